"""What an architecture is to the rest of the engine: how its config is read, and its names in GGUF.

Each module of engine/architectures has one as SPEC.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.engine.checkpoints.gguf.mapping import GgufMapping
from pdserve.engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """An architecture: how its config.json becomes a `ModelConfig`, and its names in GGUF."""

    architectures: tuple[str, ...]  # Hugging Face class names ("LlamaForCausalLM")
    parse: Callable[[Mapping[str, Any]], ModelConfig]  # raises UnsupportedModel
    gguf: GgufMapping | None = None
