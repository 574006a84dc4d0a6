"""A GGUF file, read as a worker would, up to the decoder."""

from pathlib import Path
from random import Random

from builders.tiny_models import write_tiny
from builders.write_gguf import write_gguf

from fuzz.mutate import mutate
from fuzz.read_model import read_everything


class Fuzzed:
    def __init__(self, folder: Path) -> None:
        self._file = folder / "model.gguf"
        source = write_tiny(folder / "hf", "llama", num_hidden_layers=1)
        self._original = write_gguf(source, folder / "whole.gguf", "Q8_0").read_bytes()
        self._head = self._original.index(b"output_norm.weight") + 4000

    def case(self, rng: Random) -> str:
        self._file.unlink(missing_ok=True)  # readers of the previous one may still map it
        self._file.write_bytes(mutate(rng, self._original, self._head))
        return read_everything(self._file)
