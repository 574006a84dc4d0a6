"""A grammar compiled by llguidance for a model's tokenizer.

A matcher has one user at a time; any thread may use it.
"""

from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from pdserve.engine.api import GRAMMAR_LIMITS
from pdserve.engine.constraints.masks import Bitmask


class GrammarError(Exception):
    """A grammar that cannot be used, with a message for its author; or an internal error, if the
    grammar is not at fault."""

    def __init__(self, message: str, is_internal: bool = False) -> None:
        super().__init__(message)
        self.is_internal = is_internal

    @property
    def param(self) -> str:
        """Request field at fault; empty for an internal error."""
        return "" if self.is_internal else "grammar"


class CompiledGrammar:
    """A grammar before the first token of an answer."""

    def __init__(self, tokenizer: Any, source: str) -> None:
        """Compile `source`. Raises GrammarError."""
        limits = LLParserLimits(**GRAMMAR_LIMITS)
        self._matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
        raise_error(self._matcher)
        self._first = np.zeros((tokenizer.vocab_size + 31) // 32, dtype=np.uint32)
        fill_bitmask(self._matcher, self._first.ctypes.data, self._first.nbytes)
        if not self._first.any() and not self._matcher.is_accepting():
            raise GrammarError("no text matches the grammar")

    def matcher(self) -> Any:
        """Return a new matcher for one choice."""
        return self._matcher.deep_copy()

    def buffer(self) -> Bitmask:
        """Return the tokens that may come first, in a new array that the caller owns; it may be
        longer than the model's vocabulary needs."""
        return self._first.copy()


def fill_bitmask(matcher: Any, address: int, num_bytes: int) -> None:
    """Write the tokens that may come next to the bitmask at an address. Raises GrammarError."""
    matcher.unsafe_compute_mask_ptr(address, num_bytes)
    raise_error(matcher)


def raise_error(matcher: Any) -> None:
    """Raise GrammarError if the matcher has failed, which is permanent."""
    if matcher.is_error():
        text = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
        raise GrammarError(text or "the grammar cannot be used")
