"""allowed_token_ids: restricts a choice to some tokens. Pure."""

from collections.abc import Iterable

from pdserve.engine.constraints.bitmask import Bitmask, bitmask_of


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
