"""Finds a sequence of ids in a stream of them. Pure."""

from collections.abc import Sequence


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
