"""The description of an architecture for the rest of the engine: how to read its config, and its
names in GGUF.

Each module of engine/architectures has one as SPEC.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pdserve.engine.checkpoints import Checkpoint, View, ViewedCheckpoint
from pdserve.engine.checkpoints.gguf import GgufMapping
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.layer import EMBEDDING

PREFIX = "model."  # of all tensors except the head


def own_names(config: ModelConfig) -> Mapping[str, View]:
    """Return no views: tensors are stored under the names of layer.py."""
    return {}


def none_unused(config: ModelConfig, name: str) -> bool:
    """Return False: checkpoints contain only the model."""
    return False


def is_mtp(config: ModelConfig, name: str) -> bool:
    """Return whether a tensor belongs to a layer after the model's last one, which predicts further
    tokens (MTP)."""
    prefix, _, rest = name.partition("model.layers.")
    number = rest.partition(".")[0]
    return not prefix and number.isdigit() and int(number) >= config.num_layers


def under_model(checkpoint: Checkpoint) -> Checkpoint:
    """Return a view of a checkpoint without a head, whose names lack "model.", under the names of a
    model with a head; return any other checkpoint unchanged."""
    if EMBEDDING.removeprefix(PREFIX) not in checkpoint.names():
        return checkpoint
    return ViewedCheckpoint(checkpoint, {f"{PREFIX}{n}": View(n) for n in checkpoint.names()})


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """An architecture: how its config.json becomes a `ModelConfig`, its names in GGUF, where its
    checkpoints store tensors that have another name there, and which of their tensors it does not
    use."""

    architectures: tuple[str, ...]  # Hugging Face class names ("LlamaForCausalLM")
    parse: Callable[[Mapping[str, Any]], ModelConfig]  # raises UnsupportedModel
    gguf: GgufMapping | None = None
    stored: Callable[[ModelConfig], Mapping[str, View]] = own_names
    unused: Callable[[ModelConfig, str], bool] = none_unused

    def view(self, checkpoint: Checkpoint, config: ModelConfig) -> ViewedCheckpoint:
        """Return the checkpoint under the names that the model loads."""
        return ViewedCheckpoint(checkpoint, self.stored(config), partial(self.unused, config))
