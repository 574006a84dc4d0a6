"""Answers that a grammar allows: random tokens of a model's tokenizer, as a worker masks them."""

import random
from collections.abc import Collection, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
from fakes.router import served, tokenizer_json
from llguidance import LLMatcher, LLParserLimits

from pdserve.engine.api import GRAMMAR_LIMITS
from pdserve.engine.api.grammar_tokenizer import make_tokenizer
from pdserve.text.structured_output.compiler import GrammarCompiler
from pdserve.text.tokenizer import TextModelInfo
from pdserve.text.tokenizer.tokenizer import Tokenizer

MAX_TOKENS = 4000
HURRY = 60  # tokens, after which tokens that end the answer are preferred
ENDS = ('"', "]", "}", "null", "0", "Z")


class Words:
    """A model's tokens, as the gateway and as a worker have them."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_ids: Collection[int]) -> None:
        self.tokenizer = Tokenizer(tokenizer_json, TextModelInfo(vocab_size, tuple(eos_ids)))
        self._file = tokenizer_json

    @cached_property
    def compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer)

    @cached_property
    def of_worker(self) -> Any:
        """Return what a worker compiles grammars for."""
        model_info = self.tokenizer.model_info
        return make_tokenizer(self._file, model_info.vocab_size, model_info.eos_ids)

    @cached_property
    def ends(self) -> list[int]:
        return [token for end in ENDS for token in self.tokenizer.encode_within(end)]


@cache
def _tiny() -> Words:
    card, _ = served()
    return Words(tokenizer_json(), card.vocab_size, card.eos_ids)


def tokenizer() -> Tokenizer:
    """Return the fake router's tokenizer."""
    return _tiny().tokenizer


def compiler() -> GrammarCompiler:
    return _tiny().compiler


class Walk:
    """An answer in progress, by default of the fake router's tokens."""

    def __init__(self, source: str, words: Words | None = None) -> None:
        self._words = words or _tiny()
        limits = LLParserLimits(**GRAMMAR_LIMITS)
        self._matcher = LLMatcher(self._words.of_worker, source, log_level=0, limits=limits)
        assert not self._matcher.is_error(), self._matcher.get_error()
        self.ids: list[int] = []

    @property
    def text(self) -> str:
        return self._words.tokenizer.decode(self.ids, skip_special_tokens=False)

    def allowed(self) -> list[int]:
        """Return the tokens that may come next; empty if the answer has ended."""
        return [int(token) for token in np.flatnonzero(self._bits())]

    def _bits(self) -> Any:
        """Return which tokens may come next: [vocab_size]."""
        size = self._words.tokenizer.model_info.vocab_size
        if self._matcher.is_stopped():
            return np.zeros(size, np.uint8)
        mask = self._matcher.compute_bitmask()
        assert not self._matcher.is_error(), self._matcher.get_error()
        return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:size]

    @property
    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    def take(self, text: str) -> bool:
        """Take a text byte by byte; return whether the grammar allows it."""
        for token in self._words.tokenizer.encode_within(text):
            if token not in self.allowed():
                return False
            assert self._matcher.consume_token(token)
            self.ids.append(token)
        return True

    def finish(self, rng: random.Random, preferred: Sequence[Sequence[int]] = ()) -> str:
        """Return the text after random tokens until it ends; those of `preferred`, each whole, are
        taken more often.
        """
        eos = list(self._words.tokenizer.model_info.eos_ids)
        rest: Sequence[int] = ()  # the remaining part of a preferred text in progress
        while (bits := self._bits()).any():
            assert len(self.ids) < MAX_TOKENS, self.text[-200:]
            hurried = len(self.ids) > HURRY
            ends = bits[eos].any()
            bits[eos] = 0
            if rest and bits[rest[0]]:
                usual = rest[:1]
            elif not bits.any() or (ends and (hurried or rng.random() < 0.2)):
                break
            elif hurried and (ending := [token for token in self._words.ends if bits[token]]):
                usual = ending[:1] if rng.random() < 0.7 else np.flatnonzero(bits)
            elif (wanted := [ids for ids in preferred if bits[ids[0]]]) and rng.random() < 0.3:
                rest = rng.choice(wanted)
                usual = rest[:1]
            else:
                usual = np.flatnonzero(bits)
            token = int(usual[rng.randrange(len(usual))])
            rest = rest[1:] if rest and token == rest[0] else ()
            assert self._matcher.consume_token(token), self._matcher.get_error()
            self.ids.append(token)
        assert self.may_end
        return self.text
