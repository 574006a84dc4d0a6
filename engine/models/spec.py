"""What an architecture is to the rest of the engine: how its config is read, and its names in GGUF.

Each module of engine/architectures has one as SPEC.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pdserve.engine.checkpoints.gguf.mapping import GgufMapping
from pdserve.engine.checkpoints.source import Checkpoint
from pdserve.engine.checkpoints.views import View, ViewedCheckpoint
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.layer import EMBEDDING

PREFIX = "model."  # of all tensors but the head


def own_names(config: ModelConfig) -> Mapping[str, View]:
    """Tensors are stored under the names of layer.py."""
    return {}


def all_used(config: ModelConfig, name: str) -> bool:
    """Checkpoints hold nothing but the model."""
    return False


def is_mtp(config: ModelConfig, name: str) -> bool:
    """Whether a tensor is of a layer behind the model's own: those predict further tokens (MTP)."""
    prefix, _, rest = name.partition("model.layers.")
    number = rest.partition(".")[0]
    return not prefix and number.isdigit() and int(number) >= config.num_layers


def under_model(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint of a model without a head, whose names do not begin with "model." as those of
    a model with one do; any other as it is."""
    if EMBEDDING.removeprefix(PREFIX) not in checkpoint.names():
        return checkpoint
    return ViewedCheckpoint(checkpoint, {f"{PREFIX}{n}": View(n) for n in checkpoint.names()})


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """An architecture: how its config.json becomes a `ModelConfig`, its names in GGUF, where its
    checkpoints keep what is not stored under its own name, and what in them it has no use for."""

    architectures: tuple[str, ...]  # Hugging Face class names ("LlamaForCausalLM")
    parse: Callable[[Mapping[str, Any]], ModelConfig]  # raises UnsupportedModel
    gguf: GgufMapping | None = None
    stored: Callable[[ModelConfig], Mapping[str, View]] = own_names
    unused: Callable[[ModelConfig, str], bool] = all_used

    def view(self, checkpoint: Checkpoint, config: ModelConfig) -> ViewedCheckpoint:
        """The checkpoint under the names that the model asks for."""
        return ViewedCheckpoint(checkpoint, self.stored(config), partial(self.unused, config))
