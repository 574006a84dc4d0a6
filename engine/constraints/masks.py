"""Which tokens a choice may have, as bits: allowed ids, bad words, the end of a thinking budget.
Pure.

A budget: thinking that restarts continues with the remaining budget. If the last ids are already a
prefix of `end_ids`, only the rest of `end_ids` follows.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.api import ThinkingBudget

Bitmask = NDArray[np.uint32]


def bitmask_of(ids: Iterable[int], vocab_size: int) -> Bitmask:
    """Return the set of these ids."""
    bitmask = np.zeros((vocab_size + 31) // 32, dtype=np.uint32)
    for token in ids:
        bitmask[token // 32] |= np.uint32(1 << token % 32)
    return bitmask


def all_but(ids: Iterable[int], vocab_size: int) -> Bitmask:
    """Return the set of all other ids."""
    return np.invert(bitmask_of(ids, vocab_size))


class SequenceSearch:
    """Search of Knuth, Morris and Pratt (1977): constant memory for any stream."""

    def __init__(self, ids: Sequence[int]) -> None:
        """`ids` must not be empty."""
        self.ids = tuple(ids)
        self.num_matched = 0  # length of the longest prefix of `ids` that ends the stream
        self._shorter = [0]  # [n - 1]: next shorter prefix that ends the first n ids
        length = 0
        for token in self.ids[1:]:
            length = self._length_after(length, token)
            self._shorter.append(length)

    def push(self, token: int) -> bool:
        """Whether this id completes the sequence; the search then restarts."""
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
    """Constraint that allows the same tokens at every position."""

    param = "allowed_token_ids"

    def __init__(self, ids: Iterable[int], vocab_size: int) -> None:
        """`ids` include those that end a choice."""
        self._bitmask = bitmask_of(ids, vocab_size)

    def accept_token(self, token: int) -> None:
        """Do nothing: generated tokens do not change the set."""

    def bitmask(self) -> Bitmask:
        return self._bitmask


class BadWords:
    """Constraint that excludes the last id of a sequence whose other ids were just generated."""

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
    """Constraint that counts the ids of one choice between `start_ids` and `end_ids`."""

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
