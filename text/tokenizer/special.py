"""Finds special tokens in text.

Invariant: in a rendered prompt, special tokens are parsed only in text that the template wrote.
"""

from collections.abc import Mapping

import tokenizers

from pdserve.text.errors import UnsupportedTokenizer
from pdserve.text.template_text import CLIENT, LAST

MAX_SPECIAL_CHARS = 1024  # of one special token; known ones have at most about 40


class SpecialTokens:
    """The special tokens of a tokenizer; tokens of one character are never parsed."""

    def __init__(self, added: Mapping[int, tokenizers.AddedToken]) -> None:
        """Initialize with the tokenizer's added tokens by id; ignores those that are not special.
        Raises UnsupportedTokenizer if a token is longer than MAX_SPECIAL_CHARS."""
        self.ids = frozenset(i for i, token in added.items() if token.special)
        self.texts = {added[i].content: i for i in self.ids if len(added[i].content) > 1}
        self._lstrip = {i for i in self.ids if added[i].lstrip}
        self._rstrip = {i for i in self.ids if added[i].rstrip}
        lengths: dict[str, set[int]] = {}
        for text in self.texts:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        longest = max(map(len, self.texts), default=0)
        if longest > MAX_SPECIAL_CHARS:
            raise UnsupportedTokenizer(
                f"tokenizer.json has a special token of {longest} characters; "
                f"the limit is {MAX_SPECIAL_CHARS}"
            )

    def split(self, text: str, origin: str | None = None) -> list[str | int]:
        """Split text into plain texts and special token ids, in order.

        The leftmost, then longest token wins. With `origin` (templates/template_text.py), a special
        token counts only if the template wrote all its characters.
        """
        parts: list[str | int] = []
        start = 0
        source = text if origin is None else origin
        for position, length in self._matches(source):
            span = source[position : position + length]
            if position < start or (origin is not None and (CLIENT in span or LAST in span)):
                continue
            token = self.texts[span]
            plain = text[start:position]
            parts.append(plain.rstrip() if token in self._lstrip else plain)
            parts.append(token)
            start = position + length
            while token in self._rstrip and text[start : start + 1].isspace():
                start += 1
        parts.append(text[start:])
        return [part for part in parts if part != ""] if parts != [""] else []

    def _matches(self, text: str) -> list[tuple[int, int]]:
        """Return (position, length) of the longest special token at each position with one."""
        matches = []
        for first, lengths in self._lengths.items():
            position = text.find(first)
            while position >= 0:
                length = next(
                    (n for n in lengths if text[position : position + n] in self.texts), 0
                )
                if length:
                    matches.append((position, length))
                position = text.find(first, position + 1)
        return sorted(matches)
