"""Reads the GGUF container (versions 2 and 3), in one file or split over several: its metadata, and
the position of each tensor in a mapped file.

No value read from a file is trusted: every count and length is compared with the rest of the file
before any allocation, so parsing needs at most a small multiple of the file's size.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import re
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pdserve.engine.checkpoints.source import CheckpointError, MappedFile
from pdserve.engine.weights import BLOCKS, PLAIN, VALUES, BlockFormat, RawTensor
from pdserve.engine.weights.formats import formats

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_KEY_BYTES = 65535  # the format's own limit
MAX_NAME_BYTES = 255
MAX_DIMS = 4
STRING, ARRAY, BOOL = 8, 9, 7
# struct's code of each metadata type of numbers.
NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
# Number of a tensor type -> name; there are gaps.
TYPES = {
    number: name
    for first, names in (
        (0, "F32 F16 Q4_0 Q4_1"),
        (6, "Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S"),
        (20, "IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16"),
        (34, "TQ1_0 TQ2_0"),
        (39, "MXFP4 NVFP4 Q1_0"),
    )
    for number, name in enumerate(names.split(), first)
}
# Values and bytes per block of types that no Format expands. engine/weights has the others.
NOT_EXPANDED = {
    "Q1_0": (128, 18),
    "Q8_1": (32, 40),
    "Q8_K": (256, 292),
    "I8": (1, 1),
    "I16": (1, 2),
    "I32": (1, 4),
    "I64": (1, 8),
}
MIN_PAIR_BYTES = 8 + 4 + 1
MIN_INFO_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The format, shape and byte position of one tensor in a GGUF file."""

    format: str  # GGUF's type name
    shape: tuple[int, ...]  # of the values, outermost first
    start: int  # byte offset in the file
    num_bytes: int


class GgufReader:
    """One parsed GGUF file; `file` stays mapped while any array refers to its bytes."""

    def __init__(self, path: Path) -> None:
        """Parse the file's header. Raises CheckpointError if the file is unreadable or
        malformed."""
        self.path = path
        self.file = MappedFile(path)
        cursor = _Cursor(self.file)
        if cursor.take(4) != b"GGUF":
            raise CheckpointError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
        version = cursor.number("I")
        if version not in VERSIONS:
            hint = " (big-endian?)" if version >> 16 else ""
            raise CheckpointError(
                f"{path}: unsupported GGUF version {version}{hint}; supported: {VERSIONS}"
            )
        num_tensors = cursor.count("Q", MIN_INFO_BYTES, "tensors")
        num_pairs = cursor.count("Q", MIN_PAIR_BYTES, "metadata keys")
        self.metadata = _read_metadata(cursor, num_pairs)
        self.tensors = _read_infos(cursor, num_tensors, self._alignment())

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        is_valid = isinstance(value, int) and 8 <= value <= 1 << 20 and value & (value - 1) == 0
        if not is_valid:
            raise CheckpointError(
                f"{self.path}: general.alignment is {value!r}: "
                "expected a power of two from 8 to 2**20"
            )
        return int(value)


class _Cursor:
    """A read position in a GGUF file; it only moves forward and never beyond the file's end."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.position = 0

    @property
    def remaining(self) -> int:
        return self.file.size - self.position

    def fail(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {problem} at byte {self.position}")

    def take(self, size: int) -> bytes:
        if size > self.remaining:
            raise self.fail(
                f"the file ends too early: {size} bytes needed, {self.remaining} remaining"
            )
        self.position += size
        return self.file.map[self.position - size : self.position]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, code: str, item_bytes: int, items: str) -> int:
        """Read the number of items that follow. Raises CheckpointError if so many items, of at
        least `item_bytes` each, do not fit into the rest of the file."""
        value: int = self.number(code)
        if value * item_bytes > self.remaining:
            raise self.fail(
                f"{value} {items} do not fit into the remaining {self.remaining} bytes "
                "(the file is truncated or damaged)"
            )
        return value

    def text(self, limit: int | None = None) -> str:
        size = self.count("Q", 1, "bytes of text")
        if limit is not None and size > limit:
            raise self.fail(f"a name has {size} bytes; the limit is {limit}")
        try:
            return self.take(size).decode()
        except UnicodeDecodeError as error:
            raise self.fail("the file has a string that is not UTF-8") from error

    def texts(self, count: int) -> list[str]:
        """Read `count` strings; inlined for speed, as vocabularies have hundreds of thousands."""
        data, position, end = self.file.map, self.position, self.file.size
        length = struct.Struct("<Q").unpack_from
        texts: list[str] = []
        for _ in range(count):
            start = position + 8
            if start > end:
                raise self.fail("a metadata array of strings extends past the end of the file")
            position = start + length(data, start - 8)[0]
            if position > end:
                raise self.fail("a metadata array of strings extends past the end of the file")
            try:
                texts.append(data[start:position].decode())
            except UnicodeDecodeError as error:
                raise self.fail("a metadata array has a string that is not UTF-8") from error
        self.position = position
        return texts


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    """Read `count` pairs of metadata key and value. A value is a number, bool, str, list[str], or
    an array.array of numbers (bools as 0 and 1)."""
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text(MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} occurs twice")
        metadata[key] = _read_value(cursor, cursor.number("I"))
    return metadata


def _read_value(cursor: _Cursor, kind: int) -> Any:
    if kind == STRING:
        return cursor.text()
    if kind in NUMBERS:
        return cursor.number(NUMBERS[kind])
    if kind != ARRAY:
        raise cursor.fail(f"a metadata value has unknown type {kind}")
    item = cursor.number("I")
    if item == STRING:
        return cursor.texts(cursor.count("Q", 8, "strings"))
    if item not in NUMBERS:
        raise cursor.fail(f"a metadata array has unknown type {item}")
    numbers = array("B" if item == BOOL else NUMBERS[item])
    size = cursor.count("Q", numbers.itemsize, "numbers") * numbers.itemsize
    numbers.frombytes(cursor.take(size))
    return numbers


def _read_infos(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    for _ in range(count):
        name = cursor.text(MAX_NAME_BYTES)
        if name in infos:
            raise cursor.fail(f"tensor {name!r} occurs twice")
        num_dims = cursor.number("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise cursor.fail(
                f"tensor {name!r} has {num_dims} dimensions: expected 1 to {MAX_DIMS}"
            )
        shape = tuple(reversed([cursor.number("Q") for _ in range(num_dims)]))
        kind, size = _stored_size(cursor, name, cursor.number("I"), shape)
        offset = cursor.number("Q")
        if offset % alignment:
            raise cursor.fail(f"tensor {name!r} has offset {offset}, not a multiple of {alignment}")
        infos[name] = TensorInfo(kind, shape, offset, size)
    base = -(-cursor.position // alignment) * alignment
    return _positioned(cursor, infos, base)


def _stored_size(cursor: _Cursor, name: str, kind: int, shape: tuple[int, ...]) -> tuple[str, int]:
    """Return (type name, size in bytes) of a stored tensor. Raises CheckpointError for an unknown
    type or a shape that does not fit it."""
    if kind not in TYPES:
        raise cursor.fail(f"tensor {name!r} has unknown type {kind}")
    type_name = TYPES[kind]
    block_values, block_bytes = block_size(type_name)
    if 0 in shape or shape[-1] % block_values:
        raise cursor.fail(
            f"tensor {name!r} of shape {list(shape)} cannot be {type_name}: "
            f"a row must have a multiple of {block_values} values, and no dimension may be 0"
        )
    return type_name, math.prod(shape) // block_values * block_bytes


def block_size(type_name: str) -> tuple[int, int]:
    """Return (values, bytes) of a block of a GGUF tensor type; a plain number is a block of one
    value."""
    if type_name in PLAIN:
        return 1, PLAIN[type_name].itemsize
    if type_name in NOT_EXPANDED:
        return NOT_EXPANDED[type_name]
    kind = formats()[type_name]
    assert isinstance(kind, BlockFormat), type_name
    return kind.block_values, kind.block_bytes


def _positioned(cursor: _Cursor, infos: dict[str, TensorInfo], base: int) -> dict[str, TensorInfo]:
    """Convert the tensors' offsets to positions in the file. Raises CheckpointError if tensors
    overlap or extend past the end of the file."""
    end = base
    positioned: dict[str, TensorInfo] = {}
    for name, info in sorted(infos.items(), key=lambda item: item[1].start):
        start = base + info.start
        if start < end:
            raise CheckpointError(
                f"{cursor.file.path}: tensor {name!r} overlaps another tensor at byte {start}"
            )
        end = start + info.num_bytes
        if end > cursor.file.size:
            raise CheckpointError(
                f"{cursor.file.path}: tensor {name!r} ends at byte {end} of {cursor.file.size}: is "
                "the file truncated?"
            )
        positioned[name] = TensorInfo(info.format, info.shape, start, info.num_bytes)
    return positioned


SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
MAX_SHARDS = 1000
Place = tuple[MappedFile, TensorInfo]


def shard_names(name: str) -> list[str]:
    """Return the file names of all parts of the split model that file `name` belongs to, in order;
    only `name` if the model is not split.

    Raises CheckpointError if the part numbers in the name are invalid.
    """
    shard = SHARD.search(name)
    if shard is None:
        return [name]
    count = int(shard.group(2))
    if not 1 <= int(shard.group(1)) <= count <= MAX_SHARDS:
        raise CheckpointError(
            f"{name}: the part numbers in the file name are invalid: expected 1 to {MAX_SHARDS}"
        )
    stem = name[: shard.start()]
    return [f"{stem}-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)]


def read_shards(path: Path) -> list[GgufReader]:
    """Open all files of the model that the file at `path` belongs to, in order. Raises
    CheckpointError if a part is missing, malformed or numbered wrongly."""
    paths = [path.with_name(name) for name in shard_names(path.name)]
    if len(paths) == 1:
        return [GgufReader(path)]
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of {len(paths)} parts are missing: {', '.join(missing[:5])}"
        )
    readers = [GgufReader(part) for part in paths]
    for n, reader in enumerate(readers):
        stated = (
            reader.metadata.get("split.no", n),
            reader.metadata.get("split.count", len(paths)),
        )
        if stated != (n, len(paths)):
            raise CheckpointError(
                f"{reader.path}: its metadata says part {stated[0]} (from 0) of {stated[1]}, "
                "which contradicts its file name"
            )
    return readers


def merge(readers: list[GgufReader]) -> dict[str, Place]:
    """Return the tensors of all files of a model, by GGUF's names. Raises CheckpointError if a name
    occurs twice or the number of tensors is wrong."""
    stored: dict[str, Place] = {}
    for reader in readers:
        for name, info in reader.tensors.items():
            if name in stored:
                raise CheckpointError(f"{reader.path}: tensor {name} is also in another part")
            stored[name] = (reader.file, info)
    total = readers[0].metadata.get("split.tensors.count", len(stored))
    if total != len(stored):
        raise CheckpointError(
            f"{readers[0].path}: all parts hold {len(stored)} tensors, expected {total}"
        )
    return stored


def raw_tensor(file: MappedFile, info: TensorInfo, name: str) -> RawTensor:
    """Return a stored tensor as a view of its mapped file. Raises CheckpointError if its format is
    not one for weights."""
    if info.format in PLAIN:
        values = file.array(PLAIN[info.format], info.shape, info.start)
        return RawTensor({VALUES: values}, info.format, info.shape)
    kind = formats().get(info.format)
    if not isinstance(kind, BlockFormat):
        raise CheckpointError(
            f"{file.path}: tensor {name} is {info.format}, which is not supported for weights"
        )
    shape = (*info.shape[:-1], kind.row_bytes(info.shape[-1]))
    blocks = file.array(np.dtype(np.uint8), shape, info.start)
    return RawTensor({BLOCKS: blocks}, info.format, info.shape)
