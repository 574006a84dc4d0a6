"""Qwen 3 with a mixture of experts, added from outside the product by importing this file."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdserve.engine.architectures import qwen3, register
from pdserve.engine.models.config import LayerConfig, ModelConfig
from pdserve.engine.models.hf_config.fields import HfConfig, integer
from pdserve.engine.models.layers.stored import expand
from pdserve.engine.models.layers.torch_part import LayerStep, Setup, computes
from pdserve.engine.models.parts import Part, TensorSpec
from pdserve.engine.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Experts(Part):
    """The `top_k` best of several gated MLPs for each token, weighted by the router's softmax."""

    router: TensorSpec
    experts: tuple[tuple[TensorSpec, TensorSpec, TensorSpec], ...]  # gate, up, down of each
    top_k: int
    normed: bool  # the weights of the chosen ones sum to 1

    def tensors(self) -> tuple[TensorSpec, ...]:
        return (self.router, *(spec for expert in self.experts for spec in expert))


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """engine/models/config.py FeedForward."""

    num_experts: int
    top_k: int
    size: int
    normed: bool

    def parts(self, config: ModelConfig, prefix: str) -> tuple[Part, ...]:
        hidden = config.hidden_size
        shapes = {
            "gate": (self.size, hidden),
            "up": (self.size, hidden),
            "down": (hidden, self.size),
        }
        experts = tuple(
            tuple(
                TensorSpec(f"{prefix}mlp.experts.{n}.{name}_proj.weight", shape)
                for name, shape in shapes.items()
            )
            for n in range(self.num_experts)
        )
        router = TensorSpec(f"{prefix}mlp.gate.weight", (self.num_experts, hidden))
        return (Experts(router, experts, self.top_k, self.normed),)  # type: ignore[arg-type]


@computes(Experts)
class TorchExperts:
    def __init__(self, part: Experts, setup: Setup) -> None:
        def tensor(spec: TensorSpec) -> Tensor:
            return expand(setup.weights(spec.name), setup.dtype, setup.device)

        self._part = part
        self._ops = setup.ops
        self._router = tensor(part.router)
        self._experts = [tuple(map(tensor, expert)) for expert in part.experts]

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        scores = torch.softmax(self._ops.linear(x, self._router).float(), dim=-1)
        weights, chosen = scores.topk(self._part.top_k, dim=-1)
        if self._part.normed:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        for n, (gate, up, down) in enumerate(self._experts):
            token, rank = torch.where(chosen == n)
            if len(token):
                rows = x[token]
                y = self._ops.gated(
                    self._ops.linear(rows, gate), self._ops.linear(rows, up), "silu"
                )
                weighted = self._ops.linear(y, down) * weights[token, rank, None].to(x.dtype)
                out.index_add_(0, token, weighted)
        return out


def parse(hf: HfConfig) -> ModelConfig:
    config = qwen3.parse(hf)
    mixture = MixtureOfExperts(
        integer(hf, "num_local_experts"),
        integer(hf, "num_experts_per_tok"),
        integer(hf, "moe_intermediate_size"),
        bool(hf.get("norm_topk_prob", False)),
    )

    def layer(n: int, given: LayerConfig) -> LayerConfig:
        return given if n in hf["mlp_only_layers"] else replace(given, feed_forward=mixture)

    return replace(config, layers=tuple(layer(n, one) for n, one in enumerate(config.layers)))


register(ModelSpec(("Qwen3MoeForCausalLM",), parse))
