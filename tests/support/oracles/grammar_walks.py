"""Answers that a grammar allows: random tokens of the fake router's tokenizer, as a worker masks
them."""

import random
from functools import cache

from fakes.router import served, tokenizer_json
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from pdserve.engine.api.sampling_bounds import GRAMMAR_LIMITS
from pdserve.gateway.grammars.compiler import GrammarCompiler
from pdserve.gateway.text.tokenizer import Tokenizer
from pdserve.gateway.text.vocabulary import TextCard

MAX_TOKENS = 4000
HURRY = 60  # tokens, after which what ends is preferred
ENDS = ('"', "]", "}", "null", "0", "Z")


@cache
def tokenizer() -> Tokenizer:
    card, _ = served()
    return Tokenizer(tokenizer_json(), TextCard(card.vocab_size, tuple(card.eos_ids)))


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer())


class _Words:
    """As a worker has them: it knows the tokens alone."""

    def __init__(self) -> None:
        words = tokenizer()
        self.eos_token_id = words.card.eos_ids[0]
        self.bos_token_id = None
        self.tokens = [words.token_bytes(token) for token in range(words.card.vocab_size)]
        self.special_token_ids = sorted(words.special.ids)

    def __call__(self, text: bytes) -> list[int]:
        return tokenizer().encode_alone(text.decode())


@cache
def _vocabulary() -> LLTokenizer:
    card = tokenizer().card
    return LLTokenizer(
        TokenizerWrapper(_Words()), n_vocab=card.vocab_size, eos_token=list(card.eos_ids)
    )


class Walk:
    """One answer that comes to be."""

    def __init__(self, source: str) -> None:
        limits = LLParserLimits(**GRAMMAR_LIMITS)
        self._matcher = LLMatcher(_vocabulary(), source, log_level=0, limits=limits)
        assert not self._matcher.is_error(), self._matcher.get_error()
        self.ids: list[int] = []

    @property
    def text(self) -> str:
        return tokenizer().decode(self.ids, skip_special_tokens=False)

    def allowed(self) -> list[int]:
        """The tokens that may come next; empty if the answer has ended."""
        if self._matcher.is_stopped():
            return []
        mask = self._matcher.compute_bitmask()
        assert not self._matcher.is_error(), self._matcher.get_error()
        size = tokenizer().card.vocab_size
        return [token for token in range(size) if mask[token // 8] >> token % 8 & 1]

    @property
    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    def take(self, text: str) -> bool:
        """Whether the text may come next, byte by byte; it is taken."""
        for token in tokenizer().encode(text, add_special_tokens=False, parse_special=True):
            if token not in self.allowed():
                return False
            assert self._matcher.consume_token(token)
            self.ids.append(token)
        return True

    def finish(self, rng: random.Random) -> str:
        """The text after random tokens until it ends."""
        words = tokenizer()
        eos = set(words.card.eos_ids)
        ends = [token for end in ENDS for token in words.encode_alone(end)]
        while allowed := self.allowed():
            assert len(self.ids) < MAX_TOKENS, self.text[-200:]
            hurried = len(self.ids) > HURRY
            if eos & set(allowed) and (hurried or rng.random() < 0.2):
                break
            usual = [token for token in allowed if token not in eos]
            if not usual:
                break
            if hurried and (ending := [token for token in ends if token in usual]):
                token = ending[0] if rng.random() < 0.7 else rng.choice(usual)
            else:
                token = rng.choice(usual)
            assert self._matcher.consume_token(token)
            self.ids.append(token)
        assert self.may_end
        return self.text
