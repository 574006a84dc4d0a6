"""Reads the safetensors container: a JSON header and the tensors of one mapped file.

The header is checked as the format requires: sizes match dtype and shape, and the tensors cover the
bytes after it without gap or overlap. Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.checkpoints.source import CheckpointError, Layout, MappedFile

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
# Types that numpy lacks are held as integers of the same size.
TYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E5M2": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
}


class SafetensorsReader:
    """One parsed safetensors file; `file` stays mapped while any array refers to its bytes."""

    def __init__(self, path: Path) -> None:
        """Parse the file's header. Raises CheckpointError if the file is unreadable or
        malformed."""
        self.path = path
        self.file = MappedFile(path)
        if self.file.size < 8:
            raise self._fail("the file is too short for a header")
        length = int.from_bytes(self.file.map[:8], "little")
        if length > min(MAX_HEADER_BYTES, self.file.size - 8):
            raise self._fail(
                f"the header has {length} bytes and the file {self.file.size}; "
                f"the limit of a header is {MAX_HEADER_BYTES}"
            )
        self._base = 8 + length
        try:
            header = json.loads(self.file.map[8 : self._base], object_pairs_hook=self._unique)
        except (ValueError, RecursionError) as error:
            raise self._fail(f"the header is not JSON ({error})") from error
        if not isinstance(header, dict):
            raise self._fail("the header is not a JSON object")
        header.pop("__metadata__", None)
        # name -> (dtype, shape, first byte in the file)
        self._tensors = self._checked(header)

    def names(self) -> list[str]:
        return list(self._tensors)

    def layout(self, name: str) -> Layout:
        kind, shape, _ = self._tensors[name]
        return Layout(kind, shape)

    def array(self, name: str) -> NDArray[Any]:
        """Return a stored tensor as a view of the mapped file."""
        kind, shape, start = self._tensors[name]
        return self.file.array(TYPES[kind], shape, start)

    def release(self, name: str) -> None:
        """Free the memory of a tensor; later reads come from the file again."""
        self.file.release(self._tensors[name][2], self.array(name).nbytes)

    def _fail(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem}")

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            raise self._fail("the header has a duplicate key")
        return entries

    def _checked(self, header: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...], int]]:
        tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
        spans: list[tuple[int, int, str]] = []
        for name, entry in header.items():
            kind, shape, first, last = self._entry(name, entry)
            spans.append((first, last, name))
            tensors[name] = (kind, shape, self._base + first)
        end = 0
        for first, last, name in sorted(spans):
            if first != end:
                raise self._fail(
                    f"tensor {name} begins at byte {first} of the data, expected {end}"
                )
            end = last
        if end != self.file.size - self._base:
            data_bytes = self.file.size - self._base
            hint = ": is it truncated?" if data_bytes < end else ""
            raise self._fail(
                f"tensors take {end} bytes, the file has {data_bytes} after its header{hint}"
            )
        return tensors

    def _entry(self, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
        """Check a tensor's entry in the header; return (dtype, shape, first byte, end byte). Bytes
        count from the end of the header. Raises CheckpointError."""
        if not isinstance(entry, dict):
            raise self._fail(f"the header's entry of tensor {name} is malformed")
        kind: Any = entry.get("dtype")
        shape: Any = entry.get("shape")
        span: Any = entry.get("data_offsets")
        if not isinstance(kind, str) or kind not in TYPES:
            raise self._fail(f"tensor {name} has unknown dtype {kind!r}")
        if not _naturals(shape) or len(shape) > 8:
            raise self._fail(f"tensor {name} has a malformed shape")
        if not _naturals(span) or len(span) != 2:
            raise self._fail(f"tensor {name} has malformed data_offsets")
        first, last = span
        needed = math.prod(shape) * TYPES[kind].itemsize
        if last - first != needed:
            raise self._fail(
                f"tensor {name} needs {needed} bytes and has {last - first} by its data_offsets"
            )
        return kind, tuple(shape), first, last


def _naturals(value: Any) -> bool:
    """Return whether the value is a list of integers in [0, 2**63)."""
    return isinstance(value, list) and all(type(i) is int and 0 <= i < 1 << 63 for i in value)
