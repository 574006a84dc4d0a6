"""Descriptions of how each model family writes tool calls and reasoning; pure."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.text.parsing.arguments import ToolSchemas
from pdserve.text.parsing.reader import BlockReader
from pdserve.text.parts import ContentPart


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a tool call. The first piece of a call has the function's name; `last` ends the
    call. `cut`: the arguments of the call are incomplete."""

    name: str = ""
    arguments: str = ""  # a piece of a JSON object's text
    id: str = ""  # chosen by the model
    last: bool = False
    cut: bool = False


Calls = Generator[CallPiece | None, None, None]  # None: needs more text


class ContentParser(Protocol):
    """Parses a choice's text, which `push` gets in pieces of any size, to content parts (text,
    reasoning, calls). `finish` ends the text and returns what was held back; `cut`: the answer
    reached its length limit, so it may end inside a call."""

    def push(self, text: str) -> list[ContentPart]: ...

    def finish(self, *, cut: bool = False) -> list[ContentPart]: ...


class ReasoningParser(ContentParser, Protocol):
    """A ContentParser that separates the reasoning; `closed`: no more reasoning can follow."""

    @property
    def closed(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a call is written where a grammar constrains the answer: `begin`, with the function's
    name in place of NAME, then the arguments as JSON, then `end`. A call begins where free text
    contains `trigger`."""

    begin: str
    end: str
    trigger: str


def object_form(begin: str, end: str, space: str = "", *, arguments: str = "arguments") -> CallForm:
    """Return the form of a call that is a JSON object between the tags `begin` and `end`, with
    `space` between the object and each tag. `arguments`: the object's key for the arguments."""
    return CallForm(
        f'{begin}{space}{{"name": "NAME", "{arguments}": ', f"}}{space}{end}", trigger=begin
    )


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """How a model family writes tool calls.

    openers: tags each of which begins a block of calls.
    bare: characters each of which begins a block without a tag, at the start of the answer. The
        first call of such a block must be of a known tool.
    read: reads the calls of a block after its opening tag ("" without one). Raises Malformed if the
        text is not a call.
    special: texts that the parser must see even if they are special tokens.
    make_parser: makes a parser of whole answers, including reasoning, for use instead of `read`.
        Arguments: a function that makes call ids, whether several calls are allowed, and the tools.
    opening: the first input of that parser if the answer continues an assistant message.
    answer_tags: tags around the text of an answer, which are dropped.
    """

    name: str  # vLLM's name, if vLLM supports the family
    matches: Callable[[str], bool]  # whether a chat template is of this family
    form: CallForm
    openers: Sequence[str] = ()
    bare: str = ""
    read: Callable[[BlockReader, str, ToolSchemas], Calls] | None = None
    special: Sequence[str] = ()
    make_parser: Callable[[Callable[[], str], bool, ToolSchemas | None], ContentParser] | None = (
        None
    )
    opening: str = ""
    answer_tags: Sequence[str] = ()
    in_fences: bool = False  # calls in fenced code are calls
    id_len: int = 0  # letters and digits of a call's id, if templates require a fixed number

    @property
    def has_tags(self) -> bool:
        """Whether each call begins with a tag, so that a JSON answer cannot be mistaken for a
        call."""
        return self.form.trigger in self.openers


def tagged_family(
    name: str,
    begin: str,
    end: str,
    read: Callable[[BlockReader, str, ToolSchemas], Calls],
    *,
    matches: Callable[[str], bool] | None = None,
    space: str = "",
    openers: Sequence[str] = (),
    special: Sequence[str] = (),
    answer_tags: Sequence[str] = (),
) -> ToolFamily:
    """Return a family that writes blocks of calls between the tags `begin` and `end`.

    `matches` tells whether a chat template is of the family; by default, whether it contains
    `begin`. `space`: text between a tag and a call that a grammar constrains. `openers`, `special`:
    further opening tags, and further texts that the parser must see even if they are special
    tokens.
    """
    return ToolFamily(
        name,
        matches or (lambda template: begin in template),
        object_form(begin, end, space),
        openers=(begin, *openers),
        read=read,
        special=(begin, end, *special),
        answer_tags=answer_tags,
    )


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """How a model family writes reasoning: the reasoning between `begin` and `end`, then the
    answer.

    make: makes a parser; its argument says whether the prompt has already opened the reasoning.
    after: the text after which the answer begins.
    special: texts that the parser must see even if they are special tokens.
    written: what the model itself writes for `begin` and `end`, if that differs.
    lead: text between `after` and a structured answer, without text that the model may write there
        otherwise.
    opening: the first input of the parser if the answer continues an assistant message.
    answer_tags: tags around the text of an answer, which are dropped.
    """

    name: str
    matches: Callable[[str], bool]  # whether a chat template is of this family
    make: Callable[[bool], ReasoningParser]
    begin: str
    end: str
    after: str
    special: Sequence[str] = ()
    written: tuple[str, str] | None = None
    lead: str = ""
    opening: str = ""
    answer_tags: Sequence[str] = ()
