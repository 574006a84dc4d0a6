"""A loaded model does not keep its file's pages in memory next to the packed copy."""

from pathlib import Path

import numpy as np
import pytest
from builders.tiny_models import write_tiny
from builders.write_gguf import write_gguf

from pdserve.engine.checkpoints import WeightLoader
from pdserve.engine.load import open_checkpoint
from pdserve.engine.weights import RawTensor


def resident_bytes(file: Path) -> int:
    """Return the resident bytes of all mappings of the file in this process."""
    found, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            found = line.endswith(str(file))
        elif found and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def byte_sum(raw: RawTensor) -> int:
    return sum(int(part.view(np.uint8).sum(dtype=np.int64)) for part in raw.parts.values())


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_pages_of_copied_tensors_are_released(
    tmp_path: Path, kind: str, copied: bool, hashed: bool
) -> None:
    folder = write_tiny(tmp_path / "hf", "llama", hidden_size=384, intermediate_size=1024)
    file = folder / "model.safetensors"
    path = folder
    if kind == "gguf":
        path = file = write_gguf(folder, tmp_path / "m.gguf", "F16")
    checkpoint = open_checkpoint(path)
    shapes = {name: checkpoint.layout(name).shape for name in checkpoint.names()}
    sums = {}
    with WeightLoader(
        checkpoint, shapes, None, 2, hashed, copied, lambda fraction: None
    ) as weights:
        for name in shapes:
            sums[name] = byte_sum(weights(name))
        if hashed:
            assert weights.digest()
    left = resident_bytes(file) / file.stat().st_size
    assert left < 0.1 if copied else left > 0.9
    for name, before in sums.items():  # and can be read from the file again
        assert byte_sum(checkpoint.tensor(name)) == before
