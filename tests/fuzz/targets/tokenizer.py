"""A tokenizer.json, and a text to encode with it.

A panic of the Rust library is expected: its tokenizer worker answers with an error.
"""

import json
from pathlib import Path
from random import Random

from builders.tiny_spm import spm_metadata
from fakes.router import tokenizer_json

from fuzz.mutate import STRINGS, change
from pdserve.engine.checkpoints.gguf.tokenizer import tokenizer_json as sentence_piece
from pdserve.text import TextError, UnsupportedTokenizer
from pdserve.text.tokenizer import TextModelInfo
from pdserve.text.tokenizer.tokenizer import Tokenizer

TEXT = "hello <|im_start|>wörld \u2581 🙂 \x00"


class Fuzzed:
    def __init__(self, folder: Path) -> None:
        self._trees = [json.loads(tokenizer_json()), json.loads(sentence_piece(spm_metadata()))]

    def case(self, rng: Random) -> str:
        tree = rng.choice(self._trees)
        for _ in range(rng.randint(1, 3)):
            tree = change(rng, tree, ("normalizer", "pre_tokenizer", "post_processor", "decoder"))
        card = TextModelInfo(vocab_size=400, bos_id=1, eos_ids=(2,), adds_bos=True)
        try:
            tokenizer = Tokenizer(json.dumps(tree).encode(), card)
            text = TEXT + rng.choice(STRINGS)
            ids = tokenizer.encode(text, add_special_tokens=True, parse_special=True)
            tokenizer.decode(ids)
        except UnsupportedTokenizer:
            return "unsupported"
        except TextError:
            return "refused"
        except BaseException as error:
            if type(error).__name__ == "PanicException":
                return "panic"
            raise
        return "read"
