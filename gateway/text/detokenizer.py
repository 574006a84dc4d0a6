"""Token ids to text, as they come.

The deltas of a stream, joined, are the text of all its ids whatever the division, and no delta
ends within a character: bytes that may still become one are held back.
"""

import codecs
from collections.abc import Collection, Sequence

from pdserve.gateway.text.pieces import Pieces


class IncrementalDetokenizer:
    """Text of one choice; O(1) a token, since only the bytes of an unfinished character wait.

    Bytes that can be no character become U+FFFD, one for each maximal part of an ill-formed
    sequence (Unicode 15, section 3.9), as soon as that is certain.
    """

    def __init__(self, pieces: Pieces, skip: Collection[int] = (), continues: bool = False) -> None:
        """`skip`: ids without text. `continues`: text stands before, so nothing is stripped."""
        self._pieces = pieces
        self._skip = skip
        self._strip = 0 if continues else pieces.strip
        self._waits = False  # the decoder has bytes that may become a character
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain after these ids; may be empty."""
        parts = []
        for token in ids:
            if token not in self._skip:
                part = self._pieces.bytes_of(token)
                parts.append(self._stripped(part) if self._strip else part)
        data = b"".join(parts)
        if not self._waits:
            try:
                return data.decode()
            except UnicodeDecodeError:
                self._waits = True  # or the bytes are no text: the decoder tells
        text = self._decoder.decode(data)
        self._waits = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """The end: U+FFFD if bytes wait for a character that will not come, else nothing."""
        return self._decoder.decode(b"", True)

    def _stripped(self, data: bytes) -> bytes:
        spaces = min(len(data) - len(data.lstrip(b" ")), self._strip)
        at_start = spaces == len(data) and not self._pieces.strip_within_first
        self._strip = self._strip - spaces if at_start else 0
        return data[spaces:]
