"""The stored tensors of a GGUF model, in one file or split over several."""

import re
from pathlib import Path

import numpy as np

from pdserve.engine.checkpoints.gguf.reader import GgufReader, TensorInfo
from pdserve.engine.checkpoints.mapped import MappedFile
from pdserve.engine.checkpoints.source import CheckpointError
from pdserve.engine.weights import BLOCKS, PLAIN, VALUES, BlockFormat, RawTensor
from pdserve.engine.weights.formats import formats

SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
MAX_SHARDS = 1000
Place = tuple[MappedFile, TensorInfo]


def shard_names(name: str) -> list[str]:
    """Return all file names of the model that `name` belongs to, in order.

    Raises CheckpointError if the part numbers are invalid.
    """
    shard = SHARD.search(name)
    if shard is None:
        return [name]
    count = int(shard.group(2))
    if not 1 <= int(shard.group(1)) <= count <= MAX_SHARDS:
        raise CheckpointError(f"{name}: invalid part number")
    stem = name[: shard.start()]
    return [f"{stem}-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)]


def read_shards(path: Path) -> list[GgufReader]:
    """Open all files of the model that `path` belongs to, in order. Raises CheckpointError."""
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
                f"{reader.path}: its metadata says part {stated[0]} (from 0) of {stated[1]}"
            )
    return readers


def merge(readers: list[GgufReader]) -> dict[str, Place]:
    """Return the tensors of all files, by GGUF's names. Raises CheckpointError."""
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
    """Return a tensor as a view of the file. Raises CheckpointError for a non-weight format."""
    if info.format in PLAIN:
        values = file.array(PLAIN[info.format], info.shape, info.start)
        return RawTensor({VALUES: values}, info.format, info.shape)
    kind = formats().get(info.format)
    if not isinstance(kind, BlockFormat):
        raise CheckpointError(f"{file.path}: tensor {name} is {info.format}, not a weight format")
    shape = (*info.shape[:-1], kind.row_bytes(info.shape[-1]))
    blocks = file.array(np.dtype(np.uint8), shape, info.start)
    return RawTensor({BLOCKS: blocks}, info.format, info.shape)
