"""Finds tool calls in the streamed text of a choice, for formats that mark calls by tags or by
their first character; pure.

The arguments of a known tool's call are streamed as soon as its name and their beginning are read;
other calls are returned whole. Text that begins like a call but turns out malformed is returned as
text, in order. If a part of the call was already returned, the call instead ends as cut off at the
first invalid character, and the text continues after it.

If the answer ends inside a call because of its length limit, the partial call is returned, without
arguments if only the name of a known tool was read. If not even the name was read, the text is
dropped if an earlier call is in the same block or a special token opened the block. An answer that
consists only of such an opening tag is dropped as well.
"""

import re
from collections.abc import Callable, Sequence
from typing import Final

from pdserve.text.parsing.arguments import ToolSchemas
from pdserve.text.parsing.family import CallPiece, Calls, ToolFamily
from pdserve.text.parsing.reader import BlockReader, CutOff, Malformed, held
from pdserve.text.parts import ContentPart, TextPart, ToolCallPart

MAX_CALL_CHARS = 1 << 20  # of one call
SLICE_CHARS = 4096  # read at once, so that removing a read prefix is cheap
MAX_SPACE = 1024  # white space held until text follows
FENCE: Final = "```"
MAX_FENCE = 1024  # a longer run of backticks is not a fence
_INFO = re.compile(r"`+|\n")  # in the rest of a line that opens a fence


class CallStream:
    """Parses the text and the tool calls of one choice in the format of a model family.

    White space is held until text follows, and dropped at the end of an answer that has calls. Tags
    around the text (`answer_tags`) are dropped at its beginning, at its end and before a call;
    elsewhere they are text. Tags in fenced code are text. A fence opens with a line that begins
    with three or more backticks and has no others; it closes with a line that begins with as many
    and has no word directly after them.
    """

    def __init__(
        self,
        family: ToolFamily | None,
        schemas: ToolSchemas,
        new_id: Callable[[], str],
        parallel: bool,
        only_calls: bool = False,
        calls_first: bool = False,
        answer_tags: Sequence[str] = (),
    ) -> None:
        """`family`: the format of the calls; None if the answer cannot have calls. `new_id` makes a
        call id where the model writes none.

        Without `parallel`, calls after the first are dropped. `only_calls`: drop text after a call.
        `calls_first`: an answer that does not begin with a call's tag has no calls. `answer_tags`:
        tags around text, in addition to the family's.
        """
        self._family = family
        self._schemas = schemas
        self._new_id = new_id
        self._parallel = parallel
        self._only_calls = only_calls
        self._answer_tags = tuple(
            dict.fromkeys((*(family.answer_tags if family else ()), *answer_tags))
        )
        self._look_for(family.openers if family else ())
        self._calls_first = calls_first  # false once the answer has begun with text
        # Characters that may begin a call without a tag, at the answer's beginning only.
        self._bare = family.bare if family and not calls_first else ""
        self._pending = ""
        self._position = 0  # text before it in `_pending` is processed
        self._later = ""  # from `_later_position` on, the text after `_pending`
        self._later_position = 0
        self._space = ""
        self._tags = ""  # held tags around text, each with the space before it
        self._tag_space = ""  # that space
        self._fence = 0  # backticks of the open fence
        self._in_info = False  # in the rest of the line that opens the fence
        self._blank = True  # the line has only white space so far
        self._ended = False
        self._cut = False  # the answer reached its length limit
        self._num_calls = 0
        self._num_pushed = 0  # characters
        self._block_start = 0  # the position of the last block
        self.starts: list[int] = []  # of each call, including the space before it
        self.complete_calls: list[int] = []  # the indices of complete calls of known tools
        self._ids: set[str] = set()  # call ids chosen by the model
        self._has_text = False  # since the last call
        self._reader: BlockReader | None = None
        self._opener = ""
        self._has_called = False  # the block has had a call
        self._in_call = False  # inside a call whose arguments are streamed
        self._name = ""  # of the last call
        self._block: Calls | None = None
        self._parts: list[ContentPart] = []

    @property
    def num_decided(self) -> int:
        """Number of characters, from the beginning of the choice, that are certainly text or inside
        a block of calls."""
        end = self._num_read if self._reader is None else self._block_start
        return end - len(self._space)

    @property
    def _num_read(self) -> int:
        waiting = len(self._pending) - self._position + len(self._later) - self._later_position
        return self._num_pushed - waiting

    def push(self, text: str) -> list[ContentPart]:
        self._num_pushed += len(text)
        self._later, self._later_position = text, 0
        return self._advance()

    def finish(self, *, cut: bool = False) -> list[ContentPart]:
        self._cut = cut
        parts: list[ContentPart] = []
        while not self._ended:
            self._ended = True
            if self._reader is not None:
                self._reader.ended, self._reader.cut = True, cut
            parts += self._advance()
        self._drop_tags()
        if self._space and not self._num_calls:
            parts.append(TextPart(self._space))
        self._space = ""
        return parts

    def _look_for(self, openers: Sequence[str]) -> None:
        self._openers = tuple(openers)
        tags = sorted((*self._answer_tags, *openers), key=len, reverse=True)  # the longest first
        self._marks = (*tags, FENCE)
        self._pattern = re.compile("|".join((*map(re.escape, tags), "`+")))
        self._longest = max(map(len, tags), default=0)
        self._fenced_marks = self._openers if self._family and self._family.in_fences else ()
        self._fenced = re.compile("|".join((*map(re.escape, self._fenced_marks), "`+")))

    def _advance(self) -> list[ContentPart]:
        has_more = True
        while has_more:
            while self._in_block() if self._reader is not None else self._in_text():
                pass
            self._pending, self._position = self._pending[self._position :], 0
            text = self._later[self._later_position : self._later_position + SLICE_CHARS]
            self._later_position += len(text)
            if self._reader is not None:
                self._reader.feed(text)
            else:
                self._pending += text
            has_more = bool(text)
        self._later, self._later_position = "", 0
        parts, self._parts = self._parts, []
        return parts

    def _in_text(self) -> bool:
        """Process pending text outside a block of calls; return whether to continue with the rest
        of it."""
        if self._calls_first and not self._num_calls:
            start = self._pending[self._position :].lstrip()
            tags = (*self._answer_tags, *self._openers)
            little_space = len(self._pending) - self._position - len(start) < MAX_SPACE
            if little_space and not self._ended and any(tag.startswith(start) for tag in tags):
                return False
            if not (little_space and start.startswith(tags)):
                self._calls_first = False
                self._look_for(())
        if self._bare:
            start = self._pending[self._position :].lstrip()
            if not start and len(self._pending) < MAX_SPACE and not self._ended:
                return False
            bare, self._bare = self._bare, ""
            # With more white space, the result would depend on the split.
            little_space = len(self._pending) - len(start) < MAX_SPACE
            if start and little_space and start[0] in bare:
                self._begin("")
                return True
        pattern, marks = self._pattern, self._marks
        if self._fence:
            pattern, marks = (_INFO, ()) if self._in_info else (self._fenced, self._fenced_marks)
        match = pattern.search(self._pending, self._position)
        if match is None:
            num_held = (
                0 if self._ended or not marks else held(self._pending[self._position :], marks)
            )
            self._emit_until(len(self._pending) - num_held)
            return False
        position, mark = match.start(), match[0]
        if mark == "\n":
            self._in_info = False
            self._emit_until(match.end())
            return True
        self._emit_until(position)
        start = self._pending[position : position + self._longest]
        is_opener = mark in self._openers
        if mark[0] == "`" and not (is_opener and self._blank):
            mark = FENCE if is_opener else mark
            following = self._pending[position + len(mark) : position + len(mark) + 1]
            if not (is_opener or self._fence or self._ended) and any(
                opener.startswith(start) for opener in self._openers
            ):
                return False  # the backticks may begin a call
            if not following and not self._ended and len(mark) < MAX_FENCE:
                return False
            self._process_backticks(len(mark), following)
            self._emit_until(position + len(mark))
            return True
        if not self._ended and any(
            tag.startswith(start) for tag in (*self._answer_tags, *self._openers) if tag != mark
        ):
            return False  # the mark may become a longer tag
        if mark in self._answer_tags:
            self._position = match.end()
            self._surround(mark)
        else:
            self._begin(mark)
        return True

    def _surround(self, tag: str) -> None:
        """Handle a tag around text: drop it before any text; after text, hold it, since it is text
        only if more text follows."""
        if not self._has_text:
            return
        self._tags += self._space + tag
        self._tag_space += self._space
        self._space = ""
        self._blank = False
        if len(self._tags) > MAX_SPACE:
            self._add_text("")

    def _drop_tags(self) -> None:
        self._space = self._tag_space + self._space
        self._tags = self._tag_space = ""

    def _add_text(self, text: str) -> None:
        self._parts.append(TextPart(self._tags + text))
        self._tags = self._tag_space = ""
        self._has_text = True

    def _process_backticks(self, length: int, following: str) -> None:
        """Open or close a code fence at a run of `length` backticks; `following` is the character
        after it."""
        if self._in_info:  # it was inline code, not a fence
            self._fence, self._in_info = 0, False
        elif self._fence:
            if self._blank and length >= self._fence and not following.isalnum():
                self._fence = 0
        elif self._blank and len(FENCE) <= length < MAX_FENCE:
            self._fence, self._in_info = length, True

    def _emit_until(self, end: int) -> None:
        """Return the pending text up to position `end` as text of the answer."""
        self._emit(self._pending[self._position : end])
        self._position = end

    def _begin(self, opener: str) -> None:
        self._block_start = self._num_read
        text, self._pending, self._position = self._pending[self._position :], "", 0
        self._reader = BlockReader(text, len(opener), ended=self._ended)
        self._reader.cut = self._cut
        self._opener = opener
        self._has_called = False
        assert self._family is not None
        assert self._family.read is not None
        self._block = self._family.read(self._reader, opener, self._schemas)

    def _in_block(self) -> bool:
        """Read calls from the open block; return True when the block has ended, False if more text
        is needed."""
        reader, block = self._reader, self._block
        assert reader is not None
        assert block is not None
        try:
            for piece in block:
                if piece is not None:
                    self._emit_call(piece)
                    reader.drop_read()
                elif len(reader.text) > MAX_CALL_CHARS:
                    reader.position = len(reader.text)
                    if self._in_call and (end := block.throw(Malformed())):
                        self._emit_call(end)
                    raise Malformed
                else:
                    return False
        except CutOff as error:
            rest = reader.text
            reader.position = len(rest)
            begun = error.name and (self._opener or error.certain)
            if self._cut and (self._in_call or begun):
                name, id = ("", "") if self._in_call else (error.name, error.id)
                self._emit_call(CallPiece(name, id=id, last=True, cut=True))
            elif self._in_call:
                self._emit_call(CallPiece(arguments=error.closing))
            elif not self._is_dropped(rest):
                self._emit(rest)
        except Malformed:
            fenced = self._opener.startswith(FENCE)
            if not self._has_called and (fenced or not self._opener):
                reader.position = len(self._opener)  # reread as text: it may have fenced code
            if not self._in_call:
                self._emit(reader.text[: reader.position])
            if fenced and not self._has_called:
                self._fence, self._in_info = len(FENCE), True
        rest = reader.text[reader.position :]
        self._pending, rest = rest[:SLICE_CHARS], rest[SLICE_CHARS:]
        if rest:
            self._later, self._later_position = rest + self._later[self._later_position :], 0
            self._ended = False  # the end is after `_later`
        self._reader = self._block = None
        self._in_call = False
        return True

    def _is_dropped(self, rest: str) -> bool:
        """Return whether to drop the rest of an answer that ended inside a block, instead of
        returning it as text."""
        if self._has_called:
            return self._cut
        special = self._family.special if self._family else ()
        if not any(text in self._opener for text in special):
            return False
        if rest.strip() == self._opener and not self._cut:
            return not (self._has_text or self._num_calls)
        return self._cut

    def _emit_call(self, piece: CallPiece) -> None:
        """Add a piece of a call to the output. Raises Malformed for a call of an unknown tool in a
        block without an opening tag, since that may be any JSON."""
        if piece.name:
            if not (self._opener or self._has_called or piece.name in self._schemas):
                raise Malformed
            self._has_called = self._in_call = True
            self._blank = False
            is_new_id = piece.id and piece.id not in self._ids
            self._ids.add(piece.id)
            id = piece.id if is_new_id else self._new_id()
            self._add_call_part(ToolCallPart(self._num_calls, id, piece.name))
            self._num_calls += 1
            self.starts.append(self._block_start - len(self._space))
            self._drop_tags()
            self._has_text = False
            self._name = piece.name
        if piece.arguments:
            self._add_call_part(ToolCallPart(self._num_calls - 1, arguments=piece.arguments))
        if piece.cut:
            self._add_call_part(ToolCallPart(self._num_calls - 1, cut=True))
        if piece.last:
            self._in_call = False
            if self._name in self._schemas and not piece.cut:
                self.complete_calls.append(self._num_calls - 1)

    def _add_call_part(self, part: ToolCallPart) -> None:
        if self._parallel or not part.index:
            self._parts.append(part)

    def _emit(self, text: str) -> None:
        if self._only_calls and self._num_calls:
            return
        *lines, last = text.rsplit("\n", 1)
        self._blank = not last.strip() and (bool(lines) or self._blank)
        text = self._space + text
        body = text.rstrip()
        if len(text) - len(body) > MAX_SPACE:
            body = text
        self._space = text[len(body) :]
        if body:
            self._add_text(body)
