"""A safetensors file in a model folder, read as a worker would, up to the decoder."""

from pathlib import Path
from random import Random

from builders.tiny_models import write_tiny

from fuzz.mutate import mutate
from fuzz.read_model import read_everything


class Fuzzed:
    def __init__(self, folder: Path) -> None:
        self._folder = write_tiny(folder / "hf", "llama", num_hidden_layers=1)
        self._file = self._folder / "model.safetensors"
        self._original = self._file.read_bytes()
        # As many changes in the values as in the header.
        self._head = 2 * (8 + int.from_bytes(self._original[:8], "little"))

    def case(self, rng: Random) -> str:
        self._file.unlink()  # readers of the previous one may still map it
        self._file.write_bytes(mutate(rng, self._original, self._head))
        return read_everything(self._folder)
