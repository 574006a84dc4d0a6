"""The feed-forward of a mixture of experts, under the tensor names that most releases have."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.engine.checkpoints.views import View, renamed, stacked
from pdserve.engine.models.layer import linear
from pdserve.engine.models.parts import Expert, ExpertRouting, Experts, Part, TensorSpec

if TYPE_CHECKING:
    from pdserve.engine.models.config import ModelConfig


MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}  # its names of them


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Implements config.py's FeedForward."""

    num_experts: int
    size: int  # values between the products of an expert
    routing: ExpertRouting
    has_correction: bool = False
    shared_size: int = 0  # of the expert that every token goes to; 0: there is none
    shared_gate: bool = False

    def parts(self, config: "ModelConfig", prefix: str) -> tuple[Part, ...]:
        mlp, hidden = prefix + "mlp.", config.hidden_size

        def expert(name: str, size: int) -> Expert:
            at = f"{mlp}{name}."
            return Expert(
                linear(at, {"gate_proj": size, "up_proj": size}, hidden),
                linear(at, {"down_proj": hidden}, size),
            )

        correction = TensorSpec(mlp + "gate.e_score_correction_bias", (self.num_experts,))
        shared_gate = TensorSpec(mlp + "shared_expert_gate.weight", (1, hidden))
        return (
            Experts(
                TensorSpec(mlp + "gate.weight", (self.num_experts, hidden)),
                correction if self.has_correction else None,
                tuple(expert(f"experts.{n}", self.size) for n in range(self.num_experts)),
                expert("shared_experts", self.shared_size) if self.shared_size else None,
                shared_gate if self.shared_gate else None,
                self.routing,
                config.activation,
            ),
        )


def stored_experts(config: "ModelConfig") -> dict[str, View]:
    """Where checkpoints keep experts if not under the names above: Mixtral's names, Qwen 2's, and
    GGUF's tensors that hold all experts of a layer."""
    views: dict[str, View] = {}
    for n, layer in enumerate(config.layers):
        if not isinstance(layer.feed_forward, MixtureOfExperts):
            continue
        mlp, mixtral = f"model.layers.{n}.mlp.", f"model.layers.{n}.block_sparse_moe."
        bias = "e_score_correction_bias"
        in_gguf = View(f"{mlp}gate.e_score_correction.bias")
        views[f"{mlp}gate.{bias}"] = View(f"{mixtral}{bias}", fallback=in_gguf)
        views[f"{mlp}gate.weight"] = View(f"{mixtral}gate.weight")
        gate = f"{mlp}shared_expert_gate.weight"  # in many GGUF files a vector
        views[gate] = View(gate, is_row=True)
        count = layer.feed_forward.num_experts
        stacks = stacked(f"{mlp}experts.", MIXTRAL, count)
        for expert in range(count):
            for ours, theirs in MIXTRAL.items():
                name = f"{mlp}experts.{expert}.{ours}.weight"
                source = f"{mixtral}experts.{expert}.{theirs}.weight"
                views[name] = View(source, fallback=stacks[name])
        views |= renamed(mlp, {f"shared_experts.{p}": f"shared_expert.{p}" for p in MIXTRAL})
    return views
