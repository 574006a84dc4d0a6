"""What a plug-in of gateway/text/tools or gateway/text/reasoning is; pure data."""

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pdserve.gateway.text.parsing.arguments import ToolSchemas
from pdserve.gateway.text.parsing.reader import BlockReader, Malformed
from pdserve.gateway.text.parsing.values import json_text, json_value
from pdserve.gateway.text.parts import ContentPart


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call as a model has written it, whole."""

    name: str
    arguments: str  # a JSON object's text
    id: str = ""  # that the model has given it


Calls = Generator[FoundCall | None, None, None]  # None: needs more text


class ContentParser(Protocol):
    """Text in any pieces in, content out; `finish` gives what was held back. `cut`: the answer has
    ended by its length, and so perhaps in the middle of a call."""

    def push(self, text: str) -> list[ContentPart]: ...

    def finish(self, *, cut: bool = False) -> list[ContentPart]: ...


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a call is written whose arguments a grammar holds to a schema: `begin`, with the
    function's name for NAME, the arguments as JSON, `end`. Free text turns into calls where
    `trigger` begins."""

    begin: str
    end: str
    trigger: str


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """How models of a family call tools.

    `read` reads the calls of a block from after the opener that it began with ("" for a block that
    began with one of the characters `bare` at the start of the answer, whose first call is one of a
    tool that the model has) and raises Malformed for
    what are none. `whole` makes a parser of whole answers instead, with reasoning; then `read` is
    not used; it begins with `opening` where the answer goes on with a message. `special`: texts
    that the parser needs even where they are special tokens.
    """

    name: str  # as vLLM calls it, where it knows it
    matches: Callable[[str], bool]  # whether a chat template is of this family
    form: CallForm
    openers: Sequence[str] = ()
    bare: str = ""
    read: Callable[[BlockReader, str, ToolSchemas], Calls] | None = None
    special: Sequence[str] = ()
    whole: Callable[[Callable[[], str], bool], ContentParser] | None = None
    opening: str = ""
    id_len: int = 0  # letters and digits of a call's id, where templates insist on so many

    @property
    def has_tags(self) -> bool:
        """Whether a call begins with a tag, which no answer in JSON begins with."""
        return self.form.trigger in self.openers


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """How models of a family think before they answer, between `begin` and `end`.

    `make(open)` makes a parser; `open`: the prompt has opened the thought already. `after`: the
    text after which the answer begins, with `lead` between where something may stand there that a
    structure leaves out. `written`: what the model writes for `begin` and `end`,
    where that is something else. `opening`: what the parser begins with where the answer goes on
    with a message.
    """

    name: str
    matches: Callable[[str], bool]  # whether a chat template is of this family
    make: Callable[[bool], ContentParser]
    begin: str
    end: str
    after: str
    special: Sequence[str] = ()
    written: tuple[str, str] | None = None
    lead: str = ""
    opening: str = ""


def call_of(value: Any, *, needs_arguments: bool = False) -> FoundCall:
    """A call written as {"name": ..., "arguments" or "parameters": ...}. Raises Malformed."""
    if not isinstance(value, dict):
        raise Malformed
    function = value.get("function")
    if isinstance(function, dict):
        value = function
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name or (needs_arguments and arguments is None):
        raise Malformed
    if isinstance(arguments, str):
        arguments = json_value(arguments) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise Malformed
    return FoundCall(name, json_text(arguments))


def json_call(
    reader: BlockReader, *, needs_arguments: bool = False
) -> Generator[None, None, FoundCall]:
    """Reads a call that is a JSON object. Raises Malformed."""
    yield from reader.space()
    if (yield from reader.first()) not in ("{", ""):
        raise Malformed
    text = yield from reader.balanced()
    return call_of(json_value(text), needs_arguments=needs_arguments)


def json_arguments(reader: BlockReader, name: str) -> Generator[None, None, FoundCall]:
    """Reads the arguments of a call, a JSON object. Raises Malformed."""
    yield from reader.space()
    if (yield from reader.first()) not in ("{", ""):
        raise Malformed
    value = json_value((yield from reader.balanced()))
    name = name.strip()
    if not name:
        raise Malformed
    return FoundCall(name, json_text(value))


def json_list(reader: BlockReader) -> Calls:
    """Reads the calls of a JSON list, whose bracket is read. Raises Malformed."""
    while True:
        yield from reader.space()
        if (yield from reader.takes("]")):
            return
        yield (yield from json_call(reader))
        yield from reader.space()
        if (yield from reader.expect(",", "]")) == "]":
            return


_FIRST_KEY = re.compile(r'\{\s*"([^"\\]{0,32})"')
_HALF_KEY = re.compile(r'\{\s*(?:"[^"\\]{0,32})?\Z')
CALL_KEYS = frozenset(("name", "type", "function", "arguments", "parameters", "id"))


def bare_call(reader: BlockReader) -> Generator[None, None, FoundCall]:
    """Reads a call that is a JSON object without tags around it, and so known by its keys alone: an
    answer that begins with another object is not held back. Raises Malformed."""
    yield from reader.space()
    while (key := _FIRST_KEY.match(reader.text, reader.at)) is None:
        rest = reader.text[reader.at : reader.at + 64]
        if rest and not _HALF_KEY.match(rest):
            raise Malformed
        yield from reader.more()
    if key[1] not in CALL_KEYS:
        raise Malformed
    return (yield from json_call(reader, needs_arguments=True))


def bare_calls(reader: BlockReader) -> Calls:
    """Reads calls that are JSON objects without tags, one after the other. Raises Malformed."""
    another = True
    while another:
        yield (yield from bare_call(reader))
        yield from reader.space()
        another = bool((yield from reader.takes(";", ","))) or (yield from reader.first()) == "{"
