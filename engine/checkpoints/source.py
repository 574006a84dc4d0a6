"""What every checkpoint looks like to the engine: Hugging Face terms, whatever the file format.

A checkpoint owns its file mappings; tensors it hands out are views that keep them alive.
"""

import difflib
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from pdserve.engine.weights.format import RawTensor


class CheckpointError(Exception):
    """A model cannot be found, read or understood; the message is for the person who named it."""


class Layout(NamedTuple):
    """How a tensor is stored."""

    format: str  # GGUF's type names, for safetensors too
    shape: tuple[int, ...]  # of the values, outermost first


@dataclass(frozen=True, slots=True)
class TextFiles:
    """What gateways need to turn text into ids and back."""

    tokenizer_json: bytes
    chat_template: str = ""  # jinja source; empty: the model has none
    generation_config: dict[str, Any] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()  # the tokenizer's own first: templates write it
    bos_id: int | None = None
    adds_bos: bool = False  # the tokenizer puts bos_id before a prompt


@dataclass(frozen=True, slots=True)
class StoredPooling:
    """What an embedding model's files say of how its hidden states become an embedding."""

    kind: str  # "last" or "mean"
    normalizes: bool  # to length 1
    max_len: int | None = None  # of a text, in tokens


class Checkpoint(Protocol):
    """A model's configuration and weights under Hugging Face names."""

    @property
    def hf_config(self) -> dict[str, Any]:
        """config.json, or the same built from a file's own metadata."""

    def names(self) -> Collection[str]:
        """Names of all tensors; a tied head is absent."""

    def layout(self, name: str) -> Layout:
        """Of one of `names()`."""

    def tensor(self, name: str) -> RawTensor:
        """One tensor, without reading it: pages come from disk at first use.

        Raises CheckpointError, with the names at hand, if there is none of that name.
        """

    def release(self, name: str) -> None:
        """Give the memory of a tensor back that the caller has done with for now; what is read of
        it later comes from the file again."""

    def text_files(self) -> TextFiles:
        """Tokenizer, template and defaults; may take seconds for a large vocabulary."""

    def pooling(self) -> StoredPooling | None:
        """Of an embedding model; None: the files say nothing of it. Raises CheckpointError for a
        way that is not supported."""

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the files that hold weights, or say how they are quantized."""

    @property
    def text_paths(self) -> tuple[str, ...]:
        """Paths of the files that `text_files` reads, as far as they are there."""


def unknown_tensor(name: str, known: Collection[str]) -> CheckpointError:
    """The error of a tensor that a checkpoint lacks, with names like it."""
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"; there is {', '.join(near)}" if near else f"; it has {len(known)} tensors"
    return CheckpointError(f"tensor {name} is missing{hint}")
