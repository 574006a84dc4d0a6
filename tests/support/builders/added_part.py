"""Arcee's models, added from outside the product: Llama with an MLP of squared ReLU.

Importing this file registers them.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from pdserve.engine.architectures import llama, register
from pdserve.engine.models import ModelConfig, ModelSpec, Part
from pdserve.engine.models.hf_config import HfConfig
from pdserve.engine.models.layer import linear
from pdserve.engine.models.torch_parts import LayerStep, Setup, computes


@dataclass(frozen=True, slots=True)
class SquaredRelu(Part):
    """max(x, 0) squared."""


@computes(SquaredRelu)
class TorchSquaredRelu:
    def __init__(self, part: SquaredRelu, setup: Setup) -> None:
        pass

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        return x.relu().square()


@dataclass(frozen=True, slots=True)
class SquaredReluMlp:
    """engine/models/config.py FeedForward."""

    def parts(self, config: ModelConfig, prefix: str) -> tuple[Part, ...]:
        mlp, hidden, size = prefix + "mlp.", config.hidden_size, config.ffn_size
        up = linear(mlp, {"up_proj": size}, hidden)
        return (up, SquaredRelu(), linear(mlp, {"down_proj": hidden}, size))


def parse(hf: HfConfig) -> ModelConfig:
    config = llama.parse({**hf, "hidden_act": "silu"})  # which none of its parts uses
    layers = tuple(replace(layer, feed_forward=SquaredReluMlp()) for layer in config.layers)
    return replace(config, layers=layers)


register(ModelSpec(("ArceeForCausalLM",), parse))
