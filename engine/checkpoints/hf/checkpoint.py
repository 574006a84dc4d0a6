"""A Hugging Face model directory: config.json and safetensors, in one file or sharded."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from pdserve.engine.checkpoints.hf.json_file import read_json
from pdserve.engine.checkpoints.hf.safetensors import SafetensorsReader
from pdserve.engine.checkpoints.hf.text import directory_text_files
from pdserve.engine.checkpoints.source import CheckpointError, Layout, TextFiles, unknown_tensor
from pdserve.engine.weights.format import RawTensor

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

    @property
    def hf_config(self) -> dict[str, Any]:
        return self._config

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(str(reader.path) for reader in self._readers.values())

    def names(self) -> Collection[str]:
        return self._owner.keys()

    def layout(self, name: str) -> Layout:
        return self._readers[self._owner[name]].layout(name)

    def tensor(self, name: str) -> RawTensor:
        if name not in self._owner:
            raise unknown_tensor(name, self._owner)
        return self._readers[self._owner[name]].tensor(name)

    def release(self, name: str) -> None:
        self._readers[self._owner[name]].release(name)

    def text_files(self) -> TextFiles:
        return directory_text_files(self._path, self._config)


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
