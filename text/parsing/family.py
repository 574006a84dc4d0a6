"""The formats of a model family: how it writes tool calls and reasoning; pure."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.text.parsing.arguments import ToolSchemas
from pdserve.text.parsing.reader import BlockReader
from pdserve.text.parts import ContentPart


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a tool call; the first piece has the name, and `last` ends the call. `cut`: the
    arguments are incomplete."""

    name: str = ""
    arguments: str = ""  # a piece of a JSON object's text
    id: str = ""  # chosen by the model
    last: bool = False
    cut: bool = False


Calls = Generator[CallPiece | None, None, None]  # None: needs more text


class ContentParser(Protocol):
    """Parses text in pieces of any size to content; `finish` returns the content held back. `cut`:
    the answer reached its length limit, and so may end inside a call."""

    def push(self, text: str) -> list[ContentPart]: ...

    def finish(self, *, cut: bool = False) -> list[ContentPart]: ...


class ReasoningParser(ContentParser, Protocol):
    """Parses reasoning; `closed`: no more reasoning follows."""

    @property
    def closed(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of a call under a grammar: `begin`, in which NAME is replaced by the function's
    name, the arguments as JSON, and `end`. A call begins where free text contains `trigger`."""

    begin: str
    end: str
    trigger: str


def object_form(begin: str, end: str, space: str = "", *, arguments: str = "arguments") -> CallForm:
    """Return the form of a JSON object between two tags, with `space` between it and each tag.
    `arguments`: the key of the arguments."""
    return CallForm(
        f'{begin}{space}{{"name": "NAME", "{arguments}": ', f"}}{space}{end}", trigger=begin
    )


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """The tool call format of a model family.

    openers: tags of which each begins a block of calls.
    bare: characters of which one begins a block without an opener, at the start of the answer. The
        first call of such a block must be of a known tool.
    read: reads the calls of a block after its opener ("" without one). Raises Malformed if the text
        is not a call.
    special: texts that the parser needs even if they are special tokens.
    make_parser: makes a parser of whole answers, including reasoning, which replaces `read`. It is
        called with a function that makes call ids, whether calls may be parallel, and the tools.
    opening: the first input of that parser if the answer continues a message.
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
        """Whether a call begins with a tag, which cannot begin an answer in JSON."""
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
    """Return a family whose blocks of calls are between two tags.

    `matches`: by default, whether a template has `begin`. `space`: between the tags and a call
    under a grammar. `openers`, `special`: more of them than the tags.
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
    """The reasoning format of a model family: reasoning between `begin` and `end`, then the answer.

    make: makes a parser; its argument says whether the prompt has already opened the reasoning.
    after: the text after which the answer begins.
    special: texts that the parser needs even if they are special tokens.
    written: the model's text for `begin` and `end`, if it differs.
    lead: text between `after` and a structured answer. It excludes optional text that the model may
        write there otherwise.
    opening: the first input of the parser if the answer continues a message.
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
