"""A GGUF model, in one file or split over several, presented in Hugging Face terms."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pdserve.engine.checkpoints.gguf.config import ReadMetadata, common_config
from pdserve.engine.checkpoints.gguf.mapping import GgufMapping
from pdserve.engine.checkpoints.gguf.reader import GgufReader, TensorInfo
from pdserve.engine.checkpoints.gguf.shards import shard_names
from pdserve.engine.checkpoints.gguf.text import gguf_text_files
from pdserve.engine.checkpoints.mapped import MappedFile
from pdserve.engine.checkpoints.source import CheckpointError, Layout, TextFiles, unknown_tensor
from pdserve.engine.weights.format import BLOCKS, VALUES, BlockFormat, RawTensor
from pdserve.engine.weights.formats import formats
from pdserve.engine.weights.plain import PLAIN
from pdserve.engine.weights.unpack import unpack

# Divisors of rope's frequencies, by what config.py calls them.
ROPE_FACTORS = {
    "factors": "rope_freqs.weight",
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}

# general.architecture -> (Hugging Face class name, mapping); raises CheckpointError
FindMapping = Callable[[str], tuple[str, GgufMapping]]


class GgufCheckpoint:
    """Implements Checkpoint; any file of a split model names the whole."""

    def __init__(self, path: Path, find_mapping: FindMapping) -> None:
        """Raises CheckpointError if a file is missing or malformed, the architecture is not known
        or a tensor has no place in it.
        """
        readers = _read_shards(path)
        self._metadata = readers[0].metadata
        self._paths = tuple(str(reader.path) for reader in readers)
        arch = self._metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise CheckpointError(f"{path}: metadata key general.architecture is missing")
        architecture, self._mapping = find_mapping(arch)
        stored = _merge(readers)
        factors = {
            key: unpack(_raw(*stored.pop(name), name)).tolist()
            for key, name in ROPE_FACTORS.items()
            if name in stored
        }
        if "token_embd.weight" not in stored:
            raise CheckpointError(f"{path}: tensor token_embd.weight is missing")
        self._tensors: dict[str, tuple[MappedFile, TensorInfo]] = {}
        for name, place in stored.items():
            hf_name = self._mapping.hf_name(name)
            if hf_name is None:
                raise CheckpointError(f"{path}: tensor {name} is not known for {arch}")
            self._tensors[hf_name] = place
        metadata = ReadMetadata(self._metadata)
        with _well_formed(path):
            common = common_config(metadata, stored, factors)
            own = self._mapping.config(metadata)
        if unknown := metadata.not_understood():
            raise CheckpointError(f"{path}: metadata keys of {arch} are not understood: {unknown}")
        vocab_size = stored["token_embd.weight"][1].shape[0]
        self._config = {
            "architectures": [architecture],
            "vocab_size": vocab_size,
            **common,
            **own,
        }

    @property
    def hf_config(self) -> dict[str, Any]:
        return self._config

    @property
    def files(self) -> tuple[str, ...]:
        return self._paths

    @property
    def text_paths(self) -> tuple[str, ...]:
        return self._paths[:1]

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def layout(self, name: str) -> Layout:
        info = self._tensors[name][1]
        return Layout(info.format, info.shape)

    def tensor(self, name: str) -> RawTensor:
        if name not in self._tensors:
            raise unknown_tensor(name, self._tensors)
        raw = _raw(*self._tensors[name], name)
        if key := self._mapping.heads_key(name):
            heads = self._config.get(key, self._config["num_attention_heads"])
            return _unpermuted(raw, heads, name)
        if self._mapping.norm_offset and name.endswith("norm.weight") and raw.format == "F32":
            values = raw.parts[VALUES] - np.float32(self._mapping.norm_offset)
            return RawTensor({VALUES: values}, raw.format, raw.shape)
        return raw

    def release(self, name: str) -> None:
        file, info = self._tensors[name]
        file.release(info.start, _raw(file, info, name).nbytes)

    def text_files(self) -> TextFiles:
        with _well_formed(self._paths[0]):
            return gguf_text_files(self._metadata)


@contextmanager
def _well_formed(path: Path | str) -> Iterator[None]:
    """What metadata of an unexpected type or value leads to becomes a CheckpointError."""
    try:
        yield
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the metadata is malformed: {error}") from error


def _read_shards(path: Path) -> list[GgufReader]:
    """All files, the first one first."""
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
        said = (reader.metadata.get("split.no", n), reader.metadata.get("split.count", len(paths)))
        if said != (n, len(paths)):
            raise CheckpointError(f"{reader.path} says it is part {said[0]} (from 0) of {said[1]}")
    return readers


def _merge(readers: list[GgufReader]) -> dict[str, tuple[MappedFile, TensorInfo]]:
    stored: dict[str, tuple[MappedFile, TensorInfo]] = {}
    for reader in readers:
        for name, info in reader.tensors.items():
            if name in stored:
                raise CheckpointError(f"{reader.path}: tensor {name} is in another part too")
            stored[name] = (reader.file, info)
    total = readers[0].metadata.get("split.tensors.count", len(stored))
    if total != len(stored):
        raise CheckpointError(f"{readers[0].path}: {len(stored)} tensors in all parts, not {total}")
    return stored


def _raw(file: MappedFile, info: TensorInfo, name: str) -> RawTensor:
    """A view of the file."""
    if info.format in PLAIN:
        values = file.array(PLAIN[info.format], info.shape, info.start)
        return RawTensor({VALUES: values}, info.format, info.shape)
    kind = formats().get(info.format)
    if not isinstance(kind, BlockFormat):
        raise CheckpointError(f"{file.path}: tensor {name} is {info.format}, which is no weight")
    shape = (*info.shape[:-1], kind.row_bytes(info.shape[-1]))
    blocks = file.array(np.dtype(np.uint8), shape, info.start)
    return RawTensor({BLOCKS: blocks}, info.format, info.shape)


def _unpermuted(raw: RawTensor, heads: int, name: str) -> RawTensor:
    """Rows in Hugging Face's order: GGML's rope pairs neighbours, Hugging Face's the two halves.

    Rows move whole, so it works on stored blocks.
    """
    if not isinstance(heads, int) or heads < 1 or raw.shape[0] % (2 * heads):
        raise CheckpointError(f"{name}: {raw.shape[0]} rows are no pairs of {heads} heads")
    order = np.arange(raw.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2)
    return raw.rows(order.reshape(-1))
