"""Llama with another activation, added from outside the product: the gate of its MLP is mish
(arXiv:1908.08681).

Importing this file registers it.
"""

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.functional import mish

from pdserve.engine.architectures import register
from pdserve.engine.models import ModelConfig, ModelSpec, Part, linear
from pdserve.engine.models.hf_config import HfConfig, standard
from pdserve.engine.models.torch_parts import Setup, TorchPart, computes


@dataclass(frozen=True, slots=True)
class MishGate(Part):
    """mish(first half of x) * second half of x."""


@computes(MishGate)
def mish_gate(part: MishGate, setup: Setup) -> TorchPart:
    def gate_halves(x: Tensor, step: object) -> Tensor:
        first, second = x.chunk(2, dim=1)
        return mish(first) * second

    return gate_halves


@dataclass(frozen=True, slots=True)
class MishMlp:
    """engine/models/config.py FeedForward."""

    def parts(self, config: ModelConfig, prefix: str) -> tuple[Part, ...]:
        mlp, hidden, size = prefix + "mlp.", config.hidden_size, config.ffn_size
        gate_up = linear(mlp, {"gate_proj": size, "up_proj": size}, hidden)
        return (gate_up, MishGate(), linear(mlp, {"down_proj": hidden}, size))


def parse(hf: HfConfig) -> ModelConfig:
    config = standard({**hf, "hidden_act": None})  # no part has an activation by name
    layers = tuple(replace(layer, feed_forward=MishMlp()) for layer in config.layers)
    return replace(config, layers=layers)


register(ModelSpec(("MishForCausalLM",), parse))
