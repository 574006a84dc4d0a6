"""bad_words: sequences of ids that a choice never completes. Pure."""

from collections import deque
from collections.abc import Sequence

from pdserve.engine.constraints.bitmask import Bitmask, all_but


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
