"""Thinking budget: once it is used up, only the ids that end thinking are allowed. Pure.

Thinking that restarts continues with the remaining budget. If the last ids are already a prefix of
`end_ids`, only the rest of `end_ids` follows.
"""

from pdserve.engine.api.request import ThinkingBudget
from pdserve.engine.constraints.bitmask import Bitmask, bitmask_of
from pdserve.engine.constraints.sequence_search import SequenceSearch


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
