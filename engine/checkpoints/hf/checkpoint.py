"""A Hugging Face model directory: config.json and safetensors, in one file or sharded.

A weight is one tensor of plain numbers, or the several parts of a storage format
(engine/weights/format.py): those of `x.weight` are then `x.qweight`, `x.scales` and the like.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pdserve.engine.checkpoints.hf.json_file import read_json
from pdserve.engine.checkpoints.hf.safetensors import SafetensorsReader
from pdserve.engine.checkpoints.hf.text import directory_text_files
from pdserve.engine.checkpoints.source import CheckpointError, Layout, TextFiles, unknown_tensor
from pdserve.engine.weights.format import VALUES, RawTensor
from pdserve.engine.weights.formats import formats
from pdserve.engine.weights.plain import PLAIN

INDEX = "model.safetensors.index.json"


class DirectoryCheckpoint:
    """Implements Checkpoint; the files stay mapped while a tensor of them lives."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError if a file is missing or malformed."""
        self._path = path
        if not (path / "config.json").exists():
            raise CheckpointError(f"{path} has no config.json: not a Hugging Face model directory")
        self._config = read_json(path / "config.json")
        shards, self._owner = _shards(path)
        self._readers = {name: SafetensorsReader(path / name) for name in shards}
        if not self._owner:
            for shard, reader in self._readers.items():
                self._owner |= dict.fromkeys(reader.names(), shard)
        for shard, reader in self._readers.items():
            there = set(reader.names())
            claimed = {name for name, owner in self._owner.items() if owner == shard}
            if claimed - there:
                missing = ", ".join(sorted(claimed - there)[:5])
                raise CheckpointError(f"{path / shard} lacks tensors that {INDEX} names: {missing}")
        self._parts = _grouped(self._owner)
        method = _quantization(self._config)
        if method and all(format is None for format, _ in self._parts.values()):
            raise CheckpointError(f"{path} is quantized by {method!r}, which is not supported")

    @property
    def hf_config(self) -> dict[str, Any]:
        return self._config

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(str(reader.path) for reader in self._readers.values())

    @property
    def text_paths(self) -> tuple[str, ...]:
        return tuple(str(path) for path in sorted(self._path.glob("*.j*")))

    def names(self) -> Collection[str]:
        return self._parts.keys()

    def layout(self, name: str) -> Layout:
        if (format := self._parts[name][0]) is None:
            return self._readers[self._owner[name]].layout(name)
        return Layout(format, self.tensor(name).shape)

    def tensor(self, name: str) -> RawTensor:
        if name not in self._parts:
            raise unknown_tensor(name, self._parts)
        format, stored = self._parts[name]
        parts = {part: self._reader(full).array(full) for part, full in stored.items()}
        if format is None:
            kind, shape = self.layout(name)
            if kind not in PLAIN:
                path = self._reader(name).path
                known = ", ".join(PLAIN)
                raise CheckpointError(f"{path}: tensor {name} is {kind}; supported: {known}")
            return RawTensor(parts, kind, shape)
        try:
            return RawTensor(parts, format, formats()[format].shape(parts))
        except ValueError as error:
            raise CheckpointError(f"{self._path}: {name}, stored as {format}: {error}") from error

    def release(self, name: str) -> None:
        for stored in self._parts[name][1].values():
            self._reader(stored).release(stored)

    def text_files(self) -> TextFiles:
        return directory_text_files(self._path, self._config)

    def _reader(self, stored: str) -> SafetensorsReader:
        return self._readers[self._owner[stored]]


def _quantization(config: Mapping[str, Any]) -> str:
    """The method by which a model's weights are quantized, as its config names it; MLX names none.
    Empty if they are not."""
    for key, unnamed in (("quantization_config", "an unnamed method"), ("quantization", "mlx")):
        if isinstance(given := config.get(key), dict):
            return str(given.get("quant_method", unnamed))
    return ""


def _grouped(stored: Collection[str]) -> dict[str, tuple[str | None, dict[str, str]]]:
    """Name of a weight -> (format, or None for one tensor as it is; part -> stored name)."""
    found: dict[str, tuple[str | None, dict[str, str]]] = {}
    taken: set[str] = set()
    for format in formats().values():
        for name in stored if format.hf_parts else ():
            prefix = name.removesuffix(format.hf_parts[0])
            parts = {part: prefix + part for part in format.hf_parts}
            if prefix.endswith(".") and all(full in stored for full in parts.values()):
                found[prefix + "weight"] = (format.name, parts)
                taken.update(parts.values())
    return found | {name: (None, {VALUES: name}) for name in stored if name not in taken}


def _shards(path: Path) -> tuple[list[str], dict[str, str]]:
    """(file names, tensor -> file name); the latter is empty for a single file."""
    if (path / INDEX).exists():
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path / INDEX} has no weight_map")
        shards = sorted({str(shard) for shard in weight_map.values()})
        outside = [shard for shard in shards if Path(shard).name != shard]
        if outside:
            raise CheckpointError(f"{path / INDEX} names a file outside its folder: {outside[0]}")
        missing = [shard for shard in shards if not (path / shard).exists()]
        if missing:
            raise CheckpointError(f"{path} lacks {len(missing)} shards: {', '.join(missing[:5])}")
        return shards, {str(name): str(shard) for name, shard in weight_map.items()}
    single = sorted(file.name for file in path.glob("*.safetensors"))
    if "model.safetensors" in single:
        single = ["model.safetensors"]
    if len(single) != 1:
        found = f"several without {INDEX}: {', '.join(single[:5])}" if single else "none"
        raise CheckpointError(f"{path}: want one *.safetensors file, found {found}")
    return single, {}
