"""Constraints that need no grammar, as bitmasks of the tokens that a choice may generate: allowed
ids, bad words, and the end of a thinking budget. Pure.

A choice that starts to think again continues with what remains of its thinking budget. When the
budget is used up, the choice must generate `end_ids`; if its last ids are already a prefix of
`end_ids`, only the rest of them follows.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.api import ThinkingBudget

Bitmask = NDArray[np.uint32]


def bitmask_of(ids: Iterable[int], vocab_size: int) -> Bitmask:
    """Return a bitmask of the vocabulary in which exactly the bits of `ids` are set."""
    bitmask = np.zeros((vocab_size + 31) // 32, dtype=np.uint32)
    for token in ids:
        bitmask[token // 32] |= np.uint32(1 << token % 32)
    return bitmask


def all_but(ids: Iterable[int], vocab_size: int) -> Bitmask:
    """Return a bitmask of the vocabulary in which the bits of all ids except `ids` are set."""
    return np.invert(bitmask_of(ids, vocab_size))


class SequenceSearch:
    """Finds a sequence of token ids in a stream of ids, with constant memory (algorithm of Knuth,
    Morris and Pratt, 1977)."""

    def __init__(self, ids: Sequence[int]) -> None:
        """`ids`: the sequence to find, which must not be empty."""
        self.ids = tuple(ids)
        self.num_matched = 0  # length of the longest prefix of `ids` that ends the stream
        self._shorter = [0]  # [n - 1]: next shorter prefix that ends the first n ids
        length = 0
        for token in self.ids[1:]:
            length = self._length_after(length, token)
            self._shorter.append(length)

    def push(self, token: int) -> bool:
        """Process the next id of the stream. Return whether it completes the sequence; the search
        then starts again."""
        self.num_matched = self._length_after(self.num_matched, token)
        if self.num_matched < len(self.ids):
            return False
        self.num_matched = 0
        return True

    def _length_after(self, length: int, token: int) -> int:
        while length and self.ids[length] != token:
            length = self._shorter[length - 1]
        return length + (self.ids[length] == token)


class AllowedIds:
    """Constraint that allows the same set of token ids at every position."""

    param = "allowed_token_ids"

    def __init__(self, ids: Iterable[int], vocab_size: int) -> None:
        """`ids`: the allowed token ids, which must include those that end a choice."""
        self._bitmask = bitmask_of(ids, vocab_size)

    def accept_token(self, token: int) -> None:
        """Do nothing, because the allowed ids do not depend on generated tokens."""

    def bitmask(self) -> Bitmask:
        return self._bitmask


class BadWords:
    """Constraint that prevents forbidden sequences of token ids: excludes the last id of a sequence
    when the ids before it have just been generated."""

    param = "bad_words"

    def __init__(self, words: Sequence[tuple[int, ...]], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._long = [word for word in words if len(word) > 1]
        self._never = {word[0] for word in words if len(word) == 1}
        self._always = all_but(self._never, vocab_size) if self._never else None
        self._recent = deque[int](maxlen=max((len(word) - 1 for word in words), default=0))

    def accept_token(self, token: int) -> None:
        self._recent.append(token)

    def bitmask(self) -> Bitmask | None:
        recent = tuple(self._recent)
        completing = {word[-1] for word in self._long if recent[-len(word) + 1 :] == word[:-1]}
        return all_but(self._never | completing, self._vocab_size) if completing else self._always


class ThinkingLimit:
    """Constraint that limits the tokens of one choice between the sequences `start_ids` and
    `end_ids`; at the limit it allows only the ids of `end_ids`."""

    param = "thinking"

    def __init__(self, budget: ThinkingBudget, vocab_size: int) -> None:
        self._budget = budget
        self._vocab_size = vocab_size
        self._start = SequenceSearch(budget.start_ids) if budget.start_ids else None
        self._end = SequenceSearch(budget.end_ids)
        self._thinks = self._start is None
        self._num_thought = 0

    def accept_token(self, token: int) -> None:
        if not self._thinks:
            self._thinks = self._start is not None and self._start.push(token)
            return
        self._num_thought += 1
        if self._end.push(token):
            self._thinks = False
            self._num_thought -= len(self._budget.end_ids)

    def bitmask(self) -> Bitmask | None:
        if not self._thinks or self._num_thought < self._budget.max_tokens:
            return None
        return bitmask_of((self._budget.end_ids[self._end.num_matched],), self._vocab_size)
