"""Parses Harmony, the answer format of gpt-oss, in which an answer is a sequence of messages: some
are reasoning, some tool calls, some text; pure.

A message is a header, <|message|> and a body. The prompt ends with <|start|>assistant, so an answer
begins inside the first header. An answer without messages, e.g. under a grammar, is text.
"""

import re
from collections.abc import Callable, Generator

from pdserve.text.parsing.arguments import ToolSchemas
from pdserve.text.parsing.call_stream import MAX_CALL_CHARS
from pdserve.text.parsing.family import Calls
from pdserve.text.parsing.json_calls import json_arguments
from pdserve.text.parsing.reader import BlockReader, CutOff, Malformed, held
from pdserve.text.parts import ContentPart, ReasoningPart, TextPart, ToolCallPart

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
FINAL = f"{CHANNEL}final{MESSAGE}"  # the header of the answer to the user
CALL = f"{CHANNEL}commentary to=functions."  # begins the header of a call
END = "<|end|>"
ENDS = (END, "<|call|>", "<|return|>")
SPECIAL = (CHANNEL, MESSAGE, START, *ENDS, "<|constrain|>")
MAX_HEADER_CHARS = 1024

_NEXT = tuple(end + START for end in ENDS)
_BREAKS = (*ENDS, START)  # of a header without a body
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r".*<\|channel\|>\s*([a-z]+)", re.DOTALL)  # the last one
_HEADER = re.compile(
    r"(?:assistant)?(?:\s*to=[^\s<]*)?\s*(?:<\|channel\|>\s*[a-z]{0,32})?(?:\s*to=[^\s<]*)?\s*"
    r"(?:<\|constrain\|>)?\s*\w{0,32}\s*"
)
_HALF_TAG = re.compile(r"<\|?[a-z]*\|?\Z")
_TAG = re.compile(r"<\|[a-z]+\|>")
_BEGINNINGS = (CHANNEL, MESSAGE, START, " to=", "to=", "assistant" + CHANNEL)


def is_template(template: str) -> bool:
    """Return whether the source of a chat template writes Harmony messages."""
    return CHANNEL in template and MESSAGE in template


class HarmonyStream:
    """Parses the text of one choice in the Harmony format. With `calls`, messages to functions are
    tool calls, otherwise text. Arguments are streamed for the tools in `schemas`, or for all tools
    without `schemas`; calls of other tools are returned whole."""

    def __init__(
        self,
        new_id: Callable[[], str] = str,
        parallel: bool = True,
        schemas: ToolSchemas | None = None,
        *,
        calls: bool = True,
    ) -> None:
        self._new_id = new_id
        self._parallel = parallel
        self._schemas = schemas
        self._calls = calls
        self._cut = False  # the answer reached its length limit
        self._num_calls = 0
        self._has_text = False
        self._begins = False  # the next text is another message and begins on a new line
        self._reader = BlockReader("")
        self._parts: list[ContentPart] = []
        self._messages = self._read()
        self._over = False

    @property
    def closed(self) -> bool:
        """Always True: reasoning comes in separate messages, so no text is held back as possible
        reasoning."""
        return True

    def push(self, text: str) -> list[ContentPart]:
        self._reader.feed(text)
        return self._advance()

    def finish(self, *, cut: bool = False) -> list[ContentPart]:
        self._reader.ended = True
        self._cut = cut
        return self._advance()

    def _advance(self) -> list[ContentPart]:
        if not self._over:
            self._over = next(self._messages, self) is self
        parts, self._parts = self._parts, []
        return parts

    def _read(self) -> Generator[None, None, None]:
        reader = self._reader
        while reader.text == "" and not reader.ended:
            yield
        try:
            if not (yield from self._is_harmony()):
                yield from self._body(TextPart, plain=True)
            while True:
                header = yield from self._header()
                recipient = _RECIPIENT.search(header)
                channel = _CHANNEL.match(header)
                if recipient and recipient[1].startswith("functions.") and self._calls:
                    yield from self._call(recipient[1].removeprefix("functions."))
                    if (yield from reader.take(CHANNEL)):  # a grammar's next call has no <|start|>
                        reader.position -= len(CHANNEL)
                        continue
                thinks = channel is not None and channel[1] == "analysis"
                kind = ReasoningPart if thinks else TextPart
                self._begins = kind is TextPart and self._has_text
                yield from self._body(kind)
        except CutOff:
            pass

    def _is_harmony(self) -> Generator[None, None, bool]:
        reader = self._reader
        while True:
            if any(reader.text.startswith(begin) for begin in _BEGINNINGS):
                return True
            if reader.ended or not any(
                beginning.startswith(reader.text) for beginning in _BEGINNINGS
            ):
                return False
            yield

    def _header(self) -> Generator[None, None, str]:
        """Read the next header up to <|message|> and return it. Text that is not a header is
        returned to the client as text, without tags. Raises CutOff at the end of the answer."""
        reader = self._reader
        while True:
            start = reader.position
            try:
                header, mark = yield from reader.until(
                    MESSAGE, *_BREAKS, max_chars=MAX_HEADER_CHARS
                )
            except CutOff:
                rest = reader.text[start:]
                if not _is_header(_HALF_TAG.sub("", rest)):
                    self._add_text(_TAG.sub("", _stripped_end(rest)))
                raise
            except Malformed:
                header, mark = reader.text[start : start + MAX_HEADER_CHARS], ""
                reader.position = start + MAX_HEADER_CHARS
            reader.drop_read()
            if mark == MESSAGE:
                return header
            if not _is_header(header):
                self._add_text(_TAG.sub("", header))

    def _call(self, name: str) -> Generator[None, None, None]:
        """Read the arguments of a call of the function `name`. If they are not a JSON object, the
        text stays unread, so that it is then read as the body of a text message."""
        reader = self._reader
        reader.drop_read()
        schemas = ToolSchemas({name: None}) if self._schemas is None else self._schemas
        begun = False
        try:
            for piece in _bounded(reader, json_arguments(reader, schemas, name)):
                if piece is None:
                    yield
                    continue
                if piece.name:
                    self._add_call_part(ToolCallPart(self._num_calls, self._new_id(), name))
                    begun = True
                if piece.arguments:
                    self._add_call_part(ToolCallPart(self._num_calls, arguments=piece.arguments))
                if piece.cut:
                    self._add_call_part(ToolCallPart(self._num_calls, cut=True))
                reader.drop_read()
        except CutOff as end:
            is_known = name in schemas
            if self._cut and is_known and not begun:
                self._add_call_part(ToolCallPart(self._num_calls, self._new_id(), name))
            if self._cut and is_known:
                self._add_call_part(ToolCallPart(self._num_calls, cut=True))
            elif begun:
                self._add_call_part(ToolCallPart(self._num_calls, arguments=end.closing))
            elif not self._num_calls:
                self._add_text(reader.text)
            raise
        except Malformed:
            if not begun:
                reader.position = 0
                return
        self._num_calls += 1
        yield from reader.space()

    def _add_call_part(self, part: ToolCallPart) -> None:
        if self._parallel or not part.index:
            self._parts.append(part)

    def _body(
        self, kind: type[TextPart] | type[ReasoningPart], *, plain: bool = False
    ) -> Generator[None, None, None]:
        """Read a message's body of text or reasoning (`kind`), up to the next message or to the
        header of a call, which may come anywhere under a grammar. `plain`: the answer has no
        headers, so all of it is text. Raises CutOff at the end of the answer."""
        reader = self._reader
        marks = (*(() if plain else _NEXT), *((CALL,) if self._calls else ()))
        pattern = re.compile("|".join(map(re.escape, marks)))
        while True:
            match = pattern.search(reader.text, reader.position) if marks else None
            if match:
                self._add_text(reader.text[reader.position : match.start()], kind)
                reader.position = match.start() if match[0] == CALL else match.end()
                reader.drop_read()
                return
            rest = reader.text[reader.position :]
            if reader.ended:
                self._add_text(rest if plain else _stripped_end(rest), kind)
                reader.position = len(reader.text)
                raise CutOff
            num_held = held(rest, marks)
            self._add_text(rest[: len(rest) - num_held], kind)
            reader.position += len(rest) - num_held
            reader.drop_read()
            yield

    def _add_text(self, text: str, kind: type[TextPart] | type[ReasoningPart] = TextPart) -> None:
        if not text:
            return
        if kind is TextPart:
            text = "\n" + text if self._begins else text
            self._begins, self._has_text = False, True
        self._parts.append(kind(text))


def _is_header(text: str) -> bool:
    # Collapse white space: on long runs, the pattern would backtrack through every split.
    return _HEADER.fullmatch(" ".join(text.split())) is not None


def _stripped_end(text: str) -> str:
    """Return the body of the last message without the end tag that may follow it."""
    for end in ENDS:
        text = text.removesuffix(end)
    return text


def _bounded(reader: BlockReader, calls: Calls) -> Calls:
    """Yield the pieces of a call, but end the call as malformed if its text exceeds MAX_CALL_CHARS.
    Raises Malformed if no piece of it was yielded yet."""
    for piece in calls:
        if piece is None and len(reader.text) > MAX_CALL_CHARS:
            yield calls.throw(Malformed())
            return
        yield piece
