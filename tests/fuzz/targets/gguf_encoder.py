"""The GGUF file of an encoder, read as a worker would, and its tokenizer."""

from pathlib import Path
from random import Random

from builders.charsmap import charsmap
from builders.encoder_gguf import write_encoder_gguf
from builders.tiny_encoder import write_encoder
from tokenizers import Tokenizer

from fuzz.mutate import mutate
from fuzz.read_model import read_everything
from pdserve.engine.load import open_checkpoint

TEXT = "Élan ﬁne, the\u00a0thing 中文 x"
CHARSMAP = {"tokenizer.ggml.precompiled_charsmap": charsmap({"É": "e", "ﬁ": "fi"})}


class Fuzzed:
    def __init__(self, folder: Path) -> None:
        self._file = folder / "model.gguf"
        self._originals = []
        for arch, metadata in (("bert", {}), ("xlm_roberta", CHARSMAP), ("modernbert", {})):
            source = write_encoder(folder / arch, arch, num_hidden_layers=1)
            whole = write_encoder_gguf(source, folder / "whole.gguf", **metadata).read_bytes()
            self._originals.append((whole, whole.index(b"blk.0.attn_output.weight") + 2000))

    def case(self, rng: Random) -> str:
        self._file.unlink(missing_ok=True)  # readers of the previous one may still map it
        self._file.write_bytes(mutate(rng, *rng.choice(self._originals)))
        outcome = read_everything(self._file)
        if outcome != "refused":
            text = open_checkpoint(self._file).text_files()
            Tokenizer.from_buffer(text.tokenizer_json).encode(TEXT, TEXT)
        return outcome
