"""Tracks which characters of a text a template wrote; pure.

To a template, client text is plain str; the text that it writes is TemplateText, a str with origin.
Invariant: an operation that does not track the origin returns a plain str, which counts as client
text, so no operation turns client text into a special token.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from string import Formatter
from typing import Any, SupportsIndex, TypeGuard

from markupsafe import Markup

CLIENT = "\0"  # in an origin, for a character that the template did not write
LAST = "\1"  # for the last character of the message that an answer continues
_NO_ORIGINS = str.maketrans(LAST, CLIENT)
# A field of printf: key, options and type.
_FIELD = re.compile(
    r"%(?:\(([^()]*)\))?([#0\- +]*(?:\*|\d+)?(?:\.(?:\*|\d+)?)?)[hlL]?(.)", re.DOTALL
)


class TemplateText(str):
    """A str with an origin of the same length: the characters that the template wrote, and CLIENT
    or LAST in place of all others."""

    __slots__ = ("_origin",)
    _origin: str

    def __new__(cls, text: str = "", origin: str | None = None) -> "TemplateText":
        instance = super().__new__(cls, text)
        if origin is None or len(origin) != len(instance):
            origin = CLIENT * len(instance)
        instance._origin = origin
        return instance

    def __str__(self) -> str:
        return self

    def __add__(self, other: object) -> Any:
        return concatenated((self, other)) if is_plain(other) else NotImplemented

    def __radd__(self, other: object) -> Any:
        return concatenated((other, self)) if is_plain(other) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> "TemplateText":
        return TemplateText(str.__mul__(self, count), self._origin * count)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> "TemplateText":
        return _checked(str.__mod__(self, values), self._printf_pieces(values))

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: SupportsIndex | slice) -> "TemplateText":
        return TemplateText(str.__getitem__(self, index), self._origin[index])

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

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        return self._with_origins(str.split(self, sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        return self._with_origins(str.rsplit(self, sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[Any]:
        return self._with_origins(str.splitlines(self, keepends), 0)

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._cut(*str.partition(self, sep))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._cut(*str.rpartition(self, sep))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not (isinstance(old, str) and isinstance(new, str) and old):
            return str.replace(self, old, new, count)
        origins = []
        start = 0
        for piece in str.split(self, old, count):
            origins.append(self._origin[start : start + len(piece)])
            start += len(piece) + len(old)
        return TemplateText(str.replace(self, old, new, count), origin_of(new).join(origins))

    def upper(self) -> "TemplateText":
        return recased(self, str.upper(self))

    def lower(self) -> "TemplateText":
        return recased(self, str.lower(self))

    def title(self) -> "TemplateText":
        return recased(self, str.title(self))

    def capitalize(self) -> "TemplateText":
        return recased(self, str.capitalize(self))

    def center(self, width: SupportsIndex, fill: str = " ", /) -> "TemplateText":
        return padded(self, str.center(self, width, fill))

    def ljust(self, width: SupportsIndex, fill: str = " ", /) -> "TemplateText":
        return padded(self, str.ljust(self, width, fill))

    def rjust(self, width: SupportsIndex, fill: str = " ", /) -> "TemplateText":
        return padded(self, str.rjust(self, width, fill))

    def _with_origins(self, pieces: list[str], sep_len: int) -> list["TemplateText"]:
        """Add origins to pieces of this text, in order and at least `sep_len` characters apart."""
        results: list[TemplateText] = []
        start = 0
        for piece in pieces:
            start = str.find(self, piece, start)
            results.append(self[start : start + len(piece)])
            start += len(piece) + sep_len
        return results

    def _cut(self, head: str, sep: str, tail: str) -> tuple[str, str, str]:
        """Add origins to three pieces that make up this text."""
        end = len(self) - len(tail)
        return self[: len(head)], self[len(head) : end], self[end:]

    def _printf_pieces(self, values: Any) -> Iterator[str]:
        """Yield the pieces that make up `self % values`: the text between this format string's
        fields, and the value of each field, formatted. Stops early at a field that it does not
        support, so that `_checked` makes the whole result client text."""
        arguments = iter(values if isinstance(values, tuple) else (values,))
        start = 0
        for field in _FIELD.finditer(self):
            yield self[start : field.start()]
            start = field.end()
            key, options, kind = field.groups()
            if kind == "%":
                yield self[start - 1]
                continue
            if "*" in options or (key is not None and not isinstance(values, Mapping)):
                return
            value = next(arguments, None) if key is None else values.get(key)
            if kind == "s" and not options:
                is_from_template = _is_from_template(self._origin[field.start() : start])
                yield str(value) if is_from_template else TemplateText(str(value))
            else:
                yield TemplateText(str.__mod__(f"%{options}{kind}", (value,)))
        yield self[start:]


def is_plain(other: object) -> TypeGuard[str]:
    """Return whether a value is a str with str's `+`, unlike jinja2's Markup."""
    return type(other) in (str, TemplateText)


def constant(text: str) -> TemplateText:
    """Return a text that the template wrote completely."""
    return TemplateText(text, text.translate(_NO_ORIGINS))


class SafeText(Markup):
    """A TemplateText marked by jinja2's `safe`. It keeps its origin in output; its operations are
    Markup's, whose results have no origin."""

    __slots__ = ("_origin",)
    _origin: str

    def __new__(cls, text: str = "", *_: Any) -> "SafeText":
        instance = super().__new__(cls, text)
        instance._origin = origin_of(text)
        return instance

    def __str__(self) -> str:
        return TemplateText(str.__str__(self), self._origin)


def origin_of(text: str) -> str:
    """Return the origin of a text. Raises TypeError if the value has no length."""
    return text._origin if isinstance(text, TemplateText | SafeText) else CLIENT * len(text)


def recased(source: TemplateText, text: str) -> TemplateText:
    """Return `text`, which is `source` in another case, with its origin. If the length changes,
    which is rare, the text counts as client text."""
    if len(text) != len(source):
        return TemplateText(text)
    pairs = zip(text, origin_of(source), strict=True)
    return TemplateText(text, "".join(o if o in (CLIENT, LAST) else c for c, o in pairs))


def formatted(form: str, text: str, value_of: Callable[[str], Any]) -> TemplateText:
    """Return `text`, the result of str.format on `form`, with its origin. `value_of` returns the
    value of a field."""
    if not _is_from_template(origin_of(form)):
        return TemplateText(text)
    return _checked(text, _fields(form, value_of))


def _is_from_template(origin: str) -> bool:
    """Return whether the template wrote all characters of a text."""
    return CLIENT not in origin and LAST not in origin


def _fields(form: str, value_of: Callable[[str], Any]) -> Iterator[str]:
    """Yield the pieces of a str.format string and its fields, as far as supported."""
    number = 0
    for literal, name, spec, conversion in Formatter().parse(form):
        yield constant(literal)
        if name is None:
            continue
        if not name:
            name, number = str(number), number + 1
        value = value_of(name)
        if not spec and conversion in (None, "s"):
            yield str(value)
        elif spec and "{" in spec:
            return
        else:
            field = f"{{0{'!' + conversion if conversion else ''}:{spec}}}"
            yield TemplateText(field.format(value))


def _checked(text: str, pieces: Iterable[str]) -> TemplateText:
    """Return `text` with the origins of the pieces that make it up: who wrote each character, the
    template or the client. If the joined pieces differ from `text`, all of it is client text."""
    joined = concatenated(pieces)
    return joined if joined == text else TemplateText(text)


def padded(source: TemplateText, text: str) -> TemplateText:
    """Return `text`, which is `source` with padding around it, with its origin."""
    num_before = str.find(text, source)
    num_after = len(text) - num_before - len(source)
    return TemplateText(text, CLIENT * num_before + origin_of(source) + CLIENT * num_after)


def wrapped(text: str, separator: str, **options: Any) -> TemplateText:
    """Wrap each line of `text` with textwrap, and join the resulting lines with `separator`."""
    joiner = TemplateText(separator, origin_of(separator))
    source = TemplateText(text, origin_of(text))
    return joiner.join(
        joiner.join(line._with_origins(textwrap.wrap(line, **options), 0))
        for line in source._with_origins(str.splitlines(source), 0)
    )


def indented(text: str, indent: str, *, first: bool, blank: bool) -> TemplateText:
    """Return `text` with indented lines; `first` and `blank` include the first and blank lines."""
    first_line, *other_lines = (TemplateText(text, origin_of(text)) + "\n").splitlines()
    lines = [indent + line if line or blank else line for line in other_lines]
    return TemplateText("\n").join([indent + first_line if first else first_line, *lines])


def concatenated(texts: Iterable[str]) -> TemplateText:
    """Return the concatenated texts with their origins."""
    items = list(texts)
    return TemplateText("".join(items), "".join(map(origin_of, items)))
