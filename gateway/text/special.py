"""Special tokens as text: which a prompt really contains, and which only quote them.

Only texts written by a chat template are parsed for special tokens. What clients send goes through
`guard`, which puts a mark into every special token's text in it; the mark is a character that
occurs in none of the texts, so whatever `split` still finds was written by the template.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import tokenizers

from pdserve.gateway.text.errors import TextError, UnsupportedTokenizer
from pdserve.gateway.text.messages import EFFORTS, ROLES

MAX_SPECIAL_CHARS = 1024  # of one special token; those of today have at most some 40

# Rare Han characters (CJK Extension B): letters to every test and filter of a template, unchanged
# by normalization, case and repr(), so that a marked text takes the path of the plain one.
_MARKS = range(0x20000, 0x2A6D7)


# Keys by which templates look up parts of messages, tool calls and JSON schemas. A mark in one that
# is part of a special token such as <filename> or <|start_header_id|> would hide its value.
_FIELDS = frozenset(
    ("role", "content", "name", "type", "text", "id", "tool_calls", "tool_call_id", "function",
     "arguments", "reasoning_content", "parameters", "properties", "description", "required",
     "items", "enum", "default", "title", "anyOf", "oneOf", "allOf", "additionalProperties",
     "return", "strict", "nullable", "format", "messages", "tools", "enable_thinking", "thinking",
     "reasoning_effort")
)  # fmt: skip

# Values that templates compare and write out, under keys whose values are such words alone.
_WORDS = {
    "role": frozenset(ROLES),
    "type": frozenset(
        ("function", "text", "object", "string", "number", "integer", "boolean", "array", "null")
    ),
    "reasoning_effort": frozenset(EFFORTS),
}


class SpecialTokens:
    """The special tokens of a tokenizer; those of a single character are never parsed."""

    def __init__(self, added: Mapping[int, tokenizers.AddedToken]) -> None:
        """`added`: the tokenizer's added tokens by id; those that are not special are left out.
        Raises UnsupportedTokenizer for one above MAX_SPECIAL_CHARS."""
        self.ids = frozenset(i for i, token in added.items() if token.special)
        self.texts = {added[i].content: i for i in self.ids if len(added[i].content) > 1}
        self._lstrip = {i for i in self.ids if added[i].lstrip}
        self._rstrip = {i for i in self.ids if added[i].rstrip}
        lengths: dict[str, set[int]] = {}
        for text in self.texts:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        self._sorted = sorted(self.texts)
        self._sorted_reversed = sorted(text[::-1] for text in self.texts)
        self._lasts = {text[-1] for text in self.texts}
        self._longest = max(map(len, self.texts), default=0)
        if self._longest > MAX_SPECIAL_CHARS:
            raise UnsupportedTokenizer(
                f"tokenizer.json: a special token of {self._longest} characters, "
                f"at most {MAX_SPECIAL_CHARS}"
            )
        self._joined = "\0".join(self.texts)

    def split(self, text: str) -> list[str | int]:
        """Plain texts and the ids between them, in order; leftmost, longest token first."""
        parts: list[str | int] = []
        start = 0
        for at, length in self._found(text):
            if at < start:
                continue
            token = self.texts[text[at : at + length]]
            plain = text[start:at]
            parts.append(plain.rstrip() if token in self._lstrip else plain)
            parts.append(token)
            start = at + length
            while token in self._rstrip and text[start : start + 1].isspace():
                start += 1
        parts.append(text[start:])
        return [part for part in parts if part != ""] if parts != [""] else []

    def _found(self, text: str) -> list[tuple[int, int]]:
        """(position, length) of the longest special token at every position that begins one."""
        found = []
        for first, lengths in self._lengths.items():
            at = text.find(first)
            while at >= 0:
                length = next((n for n in lengths if text[at : at + n] in self.texts), 0)
                if length:
                    found.append((at, length))
                at = text.find(first, at + 1)
        return sorted(found)

    def guard(self, text: str, mark: str) -> str:
        """The text with a mark in every special token's text, and where one could come to be
        at its borders when a template puts other text beside it (trimmed or not)."""
        cuts = {at + 1 for at, _ in self._found(text)}
        begin = len(text) - len(text.lstrip())
        end = len(text.rstrip())
        core = text[begin:end]
        for n in range(1, min(self._longest, len(core)) + 1):
            # The first test is cheap, and false for nearly every character.
            if core[n - 1] in self._lasts and _has_longer(self._sorted_reversed, core[n - 1 :: -1]):
                cuts.add(begin if n == 1 else begin + 1)
            if core[-n] in self._lengths and _has_longer(self._sorted, core[-n:]):
                cuts.add(end)
        if core and len(core) < self._longest and core in self._joined:
            cuts.add(end)
        borders = [0, *sorted(cuts), len(text)]
        return mark.join(text[start:end] for start, end in pairwise(borders)) if cuts else text

    def guard_all(self, value: Any, mark: str) -> Any:
        """`guard` of every text in JSON data, keys too, but for the words that templates know."""
        if isinstance(value, str):
            return self.guard(value, mark)
        if isinstance(value, Mapping):
            return {
                key if key in _FIELDS else self.guard(key, mark): item
                if isinstance(item, str) and item in _WORDS.get(key, ())
                else self.guard_all(item, mark)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.guard_all(item, mark) for item in value]
        return value


def _has_longer(texts: Sequence[str], start: str) -> bool:
    """Whether one of the sorted texts goes on after this start."""
    at = bisect_right(texts, start)
    return at < len(texts) and texts[at].startswith(start)


def unused_mark(*texts: str) -> str:
    """A character that occurs in none of the texts. Raises TextError if they hold every one."""
    first = chr(_MARKS[0])
    if not any(first in text for text in texts):
        return first
    used = set().union(*texts)
    for code in _MARKS:
        if chr(code) not in used:
            return chr(code)
    raise TextError("the messages contain too many rare characters")
