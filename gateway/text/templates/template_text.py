"""Text that knows which of its characters a template wrote; pure.

A template computes with what clients send as it is, and what it writes itself are TemplateTexts: to
it a str like any other, with an origin beside it. An operation that says nothing of the origin of
its result gives a plain str. A plain str counts as a client's, so that no operation, known here or
not, makes a special token of a client's text.
"""

from collections.abc import Iterable
from typing import Any, SupportsIndex, TypeGuard

CLIENT = "\0"  # in an origin, for a character that the template did not write
LAST = "\1"  # for the character that ends the message which an answer goes on with
_NO_ORIGINS = str.maketrans(LAST, CLIENT)


class TemplateText(str):
    """A str with an origin of the same length: the characters that the template wrote, and CLIENT
    or LAST in the places of others."""

    __slots__ = ("_origin",)
    _origin: str

    def __new__(cls, text: str = "", origin: str | None = None) -> "TemplateText":
        made = super().__new__(cls, text)
        if origin is None or len(origin) != len(made):
            origin = CLIENT * len(made)
        made._origin = origin
        return made

    def __str__(self) -> str:
        return self

    def __add__(self, other: object) -> Any:
        return written((self, other)) if _is_plain(other) else NotImplemented

    def __radd__(self, other: object) -> Any:
        return written((other, self)) if _is_plain(other) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> "TemplateText":
        return TemplateText(str.__mul__(self, count), self._origin * count)

    __rmul__ = __mul__

    def __getitem__(self, at: SupportsIndex | slice) -> "TemplateText":
        return TemplateText(str.__getitem__(self, at), self._origin[at])

    def join(self, texts: Iterable[str], /) -> "TemplateText":
        items = list(texts)
        return TemplateText(str.join(self, items), self._origin.join(map(origin_of, items)))

    def strip(self, chars: str | None = None, /) -> "TemplateText":
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> "TemplateText":
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> "TemplateText":
        return self[: len(str.rstrip(self, chars))]

    def removeprefix(self, prefix: str, /) -> "TemplateText":
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str, /) -> "TemplateText":
        return self[: len(str.removesuffix(self, suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._placed(str.split(self, sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._placed(str.rsplit(self, sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._placed(str.splitlines(self, keepends), 0)

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._cut(*str.partition(self, sep))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._cut(*str.rpartition(self, sep))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not (isinstance(old, str) and isinstance(new, str) and old):
            return str.replace(self, old, new, count)
        return TemplateText(new, origin_of(new)).join(self.split(old, count))

    def upper(self) -> "TemplateText":
        return self._with_case(str.upper(self))

    def lower(self) -> "TemplateText":
        return self._with_case(str.lower(self))

    def title(self) -> "TemplateText":
        return self._with_case(str.title(self))

    def capitalize(self) -> "TemplateText":
        return self._with_case(str.capitalize(self))

    def _placed(self, pieces: list[str], sep_len: int) -> list[str]:
        """Pieces of this text, in order, of which at least `sep_len` characters lie between two."""
        placed: list[str] = []
        start = 0
        for piece in pieces:
            start = str.find(self, piece, start)
            placed.append(self[start : start + len(piece)])
            start += len(piece) + sep_len
        return placed

    def _cut(self, before: str, sep: str, after: str) -> tuple[str, str, str]:
        """Three pieces that this text consists of."""
        end = len(self) - len(after)
        return self[: len(before)], self[len(before) : end], self[end:]

    def _with_case(self, text: str) -> "TemplateText":
        """This text in another case, which seldom changes the length."""
        if len(text) != len(self):
            return TemplateText(text)
        pairs = zip(text, self._origin, strict=True)
        return TemplateText(text, "".join(o if o in (CLIENT, LAST) else c for c, o in pairs))


def _is_plain(other: object) -> TypeGuard[str]:
    """Whether it is a text that adds to another as any str does, unlike jinja2's Markup."""
    return type(other) in (str, TemplateText)


def constant(text: str) -> TemplateText:
    """A text that the template has written whole."""
    return TemplateText(text, text.translate(_NO_ORIGINS))


def origin_of(text: str) -> str:
    """The origin of a text. Raises TypeError for what is none."""
    return text._origin if isinstance(text, TemplateText) else CLIENT * len(text)


def written(texts: Iterable[str]) -> TemplateText:
    """The texts, one after the other."""
    items = list(texts)
    return TemplateText("".join(items), "".join(map(origin_of, items)))
