"""What an architecture is to the rest of the engine: how its config is read, and its names in GGUF.

Each module of engine/architectures has one as SPEC.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.engine.checkpoints.gguf.mapping import GgufMapping
from pdserve.engine.checkpoints.views import View
from pdserve.engine.models.config import ModelConfig


def own_names(config: ModelConfig) -> Mapping[str, View]:
    """Tensors are stored under the names of layer.py."""
    return {}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """An architecture: how its config.json becomes a `ModelConfig`, its names in GGUF, and where
    its checkpoints keep what is not stored under its own name."""

    architectures: tuple[str, ...]  # Hugging Face class names ("LlamaForCausalLM")
    parse: Callable[[Mapping[str, Any]], ModelConfig]  # raises UnsupportedModel
    gguf: GgufMapping | None = None
    stored: Callable[[ModelConfig], Mapping[str, View]] = own_names
