"""The interface through which the engine reads checkpoints, in Hugging Face's terms for every file
format, and the memory maps behind it.

A checkpoint owns its mapped files; the tensors it returns are views that keep the maps alive. A map
is private (copy on write), so it never changes the file. A file that shrinks while it is mapped
kills the process, as with any memory map.
"""

import difflib
import math
import mmap
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.weights import RawTensor


class CheckpointError(Exception):
    """Raised if a model cannot be found, read or understood. The message addresses the user."""


class Layout(NamedTuple):
    """The storage format and shape of a tensor."""

    format: str  # GGUF's type name, also for safetensors
    shape: tuple[int, ...]  # of the values, outermost first


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The data that gateways need to convert text to token ids and back: tokenizer, chat template,
    token ids and generation defaults."""

    tokenizer_json: bytes
    chat_template: str = ""  # jinja source; empty: the model has none
    generation_config: dict[str, Any] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()  # the tokenizer's eos token first: templates use it
    bos_id: int | None = None
    adds_bos: bool = False  # the tokenizer puts bos_id before a prompt


@dataclass(frozen=True, slots=True)
class StoredPooling:
    """How an embedding model makes an embedding from its hidden states, according to its files."""

    kind: str  # "last", "mean" or "cls"
    normalizes: bool  # to length 1
    max_len: int | None = None  # longest text, in tokens


class Checkpoint(Protocol):
    """A model's configuration and weights under Hugging Face's names; each file format implements
    it."""

    @property
    def hf_config(self) -> dict[str, Any]:
        """The content of config.json, or its equivalent built from a file's metadata."""

    def names(self) -> Collection[str]:
        """Return the names of all tensors. A head that is tied to the embedding is not listed."""

    def layout(self, name: str) -> Layout:
        """Return the storage format and shape of the tensor `name`, which must be one of
        `names()`."""

    def tensor(self, name: str) -> RawTensor:
        """Return a tensor as a view of its mapped file; its bytes are read from disk at first use.

        Raises CheckpointError, which suggests similar names, if the tensor is missing.
        """

    def release(self, name: str) -> None:
        """Free the memory that a tensor's mapped bytes occupy; later reads come from the file
        again."""

    def text_files(self) -> TextFiles:
        """Return tokenizer, chat template, token ids and generation defaults; may take seconds for
        a large vocabulary."""

    def pooling(self) -> StoredPooling | None:
        """Return the pooling of an embedding model; None if the files do not define one. Raises
        CheckpointError if the engine does not support its kind."""

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the files that hold the weights or describe their quantization."""

    @property
    def text_paths(self) -> tuple[str, ...]:
        """Paths of the existing files that `text_files` reads."""


def unknown_tensor(name: str, names: Collection[str]) -> CheckpointError:
    """Return the error to raise for a tensor that a checkpoint lacks; it suggests similar names."""
    similar = difflib.get_close_matches(name, names, n=3)
    hint = (
        f"; similar names: {', '.join(similar)}"
        if similar
        else f"; the model has {len(names)} tensors"
    )
    return CheckpointError(f"tensor {name} is missing{hint}")


LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def check_no_pointer(path: Path, start: bytes) -> None:
    """Raise CheckpointError if a file that begins with `start` only points to a file that git-lfs
    has not downloaded."""
    if start.startswith(LFS_POINTER):
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder"
        )


class MappedFile:
    """A file mapped privately into memory. `map[a:b]` copies bytes; `array` does not."""

    def __init__(self, path: Path) -> None:
        """Map the file. Raises CheckpointError if it cannot be opened, is empty or is a Git LFS
        pointer."""
        self.path = path
        try:
            with path.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        self.size = len(self.map)
        check_no_pointer(path, self.map[: len(LFS_POINTER)])

    def array(self, dtype: "np.dtype[Any]", shape: tuple[int, ...], start: int) -> NDArray[Any]:
        """Return an array over the file's bytes from position `start` on; the caller checks that
        the file has them.

        Bytes that are not aligned for `dtype` are copied.
        """
        count = math.prod(shape)
        if count == 0:
            return np.empty(shape, dtype)
        values = np.frombuffer(self.map, dtype, count, start).reshape(shape)
        return values if values.flags.aligned else values.copy()

    def release(self, start: int, count: int) -> None:
        """Free the memory that `count` mapped bytes from `start` occupy; the next access reads them
        from the file again."""
        begin = start - start % mmap.PAGESIZE
        if count and hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED, begin, start + count - begin)
