"""Answers that a grammar allows: random tokens of a model's tokenizer, as a worker masks them."""

import random
from collections.abc import Collection
from functools import cache, cached_property
from typing import Any

import numpy as np
from fakes.router import served, tokenizer_json
from llguidance import LLMatcher, LLParserLimits

from pdserve.engine.api.sampling_bounds import GRAMMAR_LIMITS
from pdserve.engine.constraints.grammars.compiled import make_tokenizer
from pdserve.gateway.grammars.compiler import GrammarCompiler
from pdserve.gateway.text.tokenizer import Tokenizer
from pdserve.gateway.text.vocabulary import TextCard

MAX_TOKENS = 4000
HURRY = 60  # tokens, after which what ends is preferred
ENDS = ('"', "]", "}", "null", "0", "Z")


class Words:
    """A model's tokens, as the gateway and as a worker have them."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_ids: Collection[int]) -> None:
        self.tokenizer = Tokenizer(tokenizer_json, TextCard(vocab_size, tuple(eos_ids)))
        self.compiler = GrammarCompiler(self.tokenizer)
        self._file = tokenizer_json

    @cached_property
    def of_worker(self) -> Any:
        """What grammars are compiled for there."""
        card = self.tokenizer.card
        return make_tokenizer(self._file, card.vocab_size, card.eos_ids)

    @cached_property
    def ends(self) -> list[int]:
        return [token for end in ENDS for token in self.tokenizer.encode_within(end)]


@cache
def _tiny() -> Words:
    card, _ = served()
    return Words(tokenizer_json(), card.vocab_size, card.eos_ids)


def tokenizer() -> Tokenizer:
    """The fake router's."""
    return _tiny().tokenizer


def compiler() -> GrammarCompiler:
    return _tiny().compiler


class Walk:
    """One answer that comes to be, by default of the fake router's tokens."""

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
        """The tokens that may come next; empty if the answer has ended."""
        if self._matcher.is_stopped():
            return []
        mask = self._matcher.compute_bitmask()
        assert not self._matcher.is_error(), self._matcher.get_error()
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        return np.flatnonzero(bits[: self._words.tokenizer.card.vocab_size]).tolist()

    @property
    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    def take(self, text: str) -> bool:
        """Whether the text may come next, byte by byte; it is taken."""
        for token in self._words.tokenizer.encode_within(text):
            if token not in self.allowed():
                return False
            assert self._matcher.consume_token(token)
            self.ids.append(token)
        return True

    def finish(self, rng: random.Random, preferred: Collection[int] = ()) -> str:
        """The text after random tokens until it ends; `preferred` are taken more often."""
        eos = set(self._words.tokenizer.card.eos_ids)
        while allowed := self.allowed():
            assert len(self.ids) < MAX_TOKENS, self.text[-200:]
            hurried = len(self.ids) > HURRY
            usual = [token for token in allowed if token not in eos]
            if not usual or (len(usual) < len(allowed) and (hurried or rng.random() < 0.2)):
                break
            known = set(usual)
            if hurried and (ending := [token for token in self._words.ends if token in known]):
                token = ending[0] if rng.random() < 0.7 else rng.choice(usual)
            elif (wanted := [t for t in preferred if t in known]) and rng.random() < 0.3:
                token = rng.choice(wanted)
            else:
                token = rng.choice(usual)
            assert self._matcher.consume_token(token), self._matcher.get_error()
            self.ids.append(token)
        assert self.may_end
        return self.text
