"""Converts a stream of token ids to text.

Invariant: the joined deltas are the text of all ids, however the ids are split into calls. No delta
ends inside a character; bytes of an unfinished character are held back.
"""

import codecs
from collections.abc import Collection, Sequence

from pdserve.gateway.text.pieces import Pieces


class IncrementalDetokenizer:
    """Detokenizes one choice in O(1) per token; buffers only the bytes of an unfinished character.

    Invalid bytes become U+FFFD, one per maximal part of an ill-formed sequence (Unicode 15,
    section 3.9), as soon as they are known to be invalid.
    """

    def __init__(self, pieces: Pieces, skip: Collection[int] = (), continues: bool = False) -> None:
        """Initialize with `skip`, the ids without text; `continues` disables stripping, because
        other text precedes."""
        self._pieces = pieces
        self._skip = skip
        self._strip = 0 if continues else pieces.strip
        self._is_partial = False  # the decoder holds bytes of an unfinished character
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """Add ids and return the text that is now final; may be empty."""
        parts = []
        for token in ids:
            if token not in self._skip:
                part = self._pieces.bytes_of(token)
                parts.append(self._stripped(part) if self._strip else part)
        data = b"".join(parts)
        if not self._is_partial:
            try:
                return data.decode()
            except UnicodeDecodeError:
                self._is_partial = True  # or the bytes are invalid; the decoder decides
        text = self._decoder.decode(data)
        self._is_partial = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """End the text: return U+FFFD if an unfinished character is held back, else ""."""
        return self._decoder.decode(b"", True)

    def _stripped(self, data: bytes) -> bytes:
        spaces = min(len(data) - len(data.lstrip(b" ")), self._strip)
        at_start = spaces == len(data) and not self._pieces.strip_within_first
        self._strip = self._strip - spaces if at_start else 0
        return data[spaces:]
