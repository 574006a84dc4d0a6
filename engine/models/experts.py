"""The feed-forward of a mixture of experts. Its tensors have the names that most releases use."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.engine.checkpoints import Nth, View, first_of, renamed
from pdserve.engine.models.layer import linear
from pdserve.engine.models.parts import Expert, ExpertRouting, Experts, Gating, Part, TensorSpec

if TYPE_CHECKING:
    from pdserve.engine.models.config import ModelConfig


MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}  # Mixtral's names


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """The settings of a mixture of experts; implements FeedForward of config.py."""

    num_experts: int
    size: int  # width of an expert's hidden layer
    routing: ExpertRouting
    has_correction: bool = False
    shared_size: int = 0  # of the expert that every token goes to; 0: none
    shared_gate: bool = False
    has_bias: bool = False  # of the router and of the experts, except the shared one
    activation: Gating | None = None  # None: the model's activation

    def parts(self, config: "ModelConfig", prefix: str) -> tuple[Part, ...]:
        mlp, hidden = prefix + "mlp.", config.hidden_size

        def expert(name: str, size: int, has_bias: bool = False) -> Expert:
            module = f"{mlp}{name}."
            return Expert(
                linear(module, {"gate_proj": size, "up_proj": size}, hidden, has_bias),
                linear(module, {"down_proj": hidden}, size, has_bias),
            )

        correction = TensorSpec(mlp + "gate.e_score_correction_bias", (self.num_experts,))
        shared_gate = TensorSpec(mlp + "shared_expert_gate.weight", (1, hidden))
        return (
            Experts(
                TensorSpec(mlp + "gate.weight", (self.num_experts, hidden)),
                TensorSpec(mlp + "gate.bias", (self.num_experts,)) if self.has_bias else None,
                correction if self.has_correction else None,
                shared_gate if self.shared_gate else None,
                tuple(
                    expert(f"experts.{n}", self.size, self.has_bias)
                    for n in range(self.num_experts)
                ),
                expert("shared_experts", self.shared_size) if self.shared_size else None,
                self.routing,
                self.activation or config.activation,
            ),
        )


def stored_experts(config: "ModelConfig") -> dict[str, View]:
    """Return views that find the experts' tensors in checkpoints with other names or layouts:
    Mixtral's names, Qwen 2's names, and stacks of all experts of a layer, in which gate and up
    share a tensor (gate first) or have one each."""
    views: dict[str, View] = {}
    for n, layer in enumerate(config.layers):
        if not isinstance(layer.feed_forward, MixtureOfExperts):
            continue
        mlp, mixtral = f"model.layers.{n}.mlp.", f"model.layers.{n}.block_sparse_moe."
        bias = "e_score_correction_bias"
        in_gguf = View(f"{mlp}gate.e_score_correction.bias")
        views[f"{mlp}gate.{bias}"] = first_of(View(f"{mixtral}{bias}"), in_gguf)
        views[f"{mlp}gate.weight"] = View(f"{mixtral}gate.weight")
        gate = f"{mlp}shared_expert_gate.weight"  # in many GGUF files a vector
        views[gate] = View(gate, is_row=True)
        count, size = layer.feed_forward.num_experts, layer.feed_forward.size
        rows = {"gate_proj": slice(0, size), "up_proj": slice(size, None)}
        for expert in range(count):
            nth = Nth(expert, count)
            for name, mixtral_name in MIXTRAL.items():
                stack = mlp + "experts." + ("gate_up_proj" if name in rows else name)
                views[f"{mlp}experts.{expert}.{name}.weight"] = first_of(
                    View(f"{mixtral}experts.{expert}.{mixtral_name}.weight"),
                    View(f"{mlp}experts.{name}.weight", matrix=nth),  # GGUF
                    View(f"{stack}.weight", rows.get(name), nth),  # GGUF
                    View(stack, rows.get(name), nth),  # transformers
                )
        views |= renamed(mlp, {f"shared_experts.{p}": f"shared_expert.{p}" for p in MIXTRAL})
    return views
