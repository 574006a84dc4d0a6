"""Apertus, added from outside the product: Llama with norms over the heads of q and k, and an MLP
without a gate whose activation, xIELU (arXiv:2411.13010), has learned parameters.

Importing this file registers it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import softplus

from pdserve.engine.architectures import register
from pdserve.engine.models import ModelConfig, ModelSpec, NormPlacement, Part
from pdserve.engine.models.hf_config import HfConfig, standard
from pdserve.engine.models.layer import linear
from pdserve.engine.models.parts import TensorSpec
from pdserve.engine.models.torch_parts import LayerStep, Setup, computes

NORMS = NormPlacement(attn_in="attention_layernorm", ffn_in="feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class Xielu(Part):
    """a x^2 + beta x for x > 0, else b (e^min(x, eps) - 1 - x) + beta x; a = softplus(alpha_p), b =
    beta + softplus(alpha_n)."""

    alpha_p: TensorSpec
    alpha_n: TensorSpec
    beta: TensorSpec
    eps: TensorSpec


@computes(Xielu)
class TorchXielu:
    def __init__(self, part: Xielu, setup: Setup) -> None:
        alpha_p, alpha_n, self._beta, self._eps = (setup.vector(spec) for spec in part.tensors())
        self._a, self._b = softplus(alpha_p), self._beta + softplus(alpha_n)

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        below = self._b * (torch.expm1(torch.minimum(x, self._eps)) - x)
        return torch.where(x > 0, self._a * x * x, below) + self._beta * x


@dataclass(frozen=True, slots=True)
class XieluMlp:
    """engine/models/config.py FeedForward."""

    def parts(self, config: ModelConfig, prefix: str) -> tuple[Part, ...]:
        mlp, hidden, size = prefix + "mlp.", config.hidden_size, config.ffn_size
        shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
        specs = (TensorSpec(f"{mlp}act_fn.{name}", shape) for name, shape in shapes.items())
        up = linear(mlp, {"up_proj": size}, hidden)
        return (up, Xielu(*specs), linear(mlp, {"down_proj": hidden}, size))


def parse(hf: HfConfig) -> ModelConfig:
    # No part uses silu.
    config = standard({**hf, "hidden_act": "silu"}, norms=NORMS, qk_norm="head")
    layers = tuple(replace(layer, feed_forward=XieluMlp()) for layer in config.layers)
    return replace(config, layers=layers)


register(ModelSpec(("ApertusForCausalLM",), parse))
