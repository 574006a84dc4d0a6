"""The terminal of `pdserve chat`: reads the user's lines, and displays the model's responses.

If prompt_toolkit is installed, the user can edit several lines at once; otherwise readline reads
one line at a time. On a terminal, responses are rendered as Markdown if rich is installed.
"""

import io
import sys
import termios
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from pdserve.cli.up.folders import data_dir

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.segment import Segment

SIGN, MORE = "> ", ". "
HISTORY = "chat_history"
HINT = "(press Ctrl-C again or Ctrl-D, or type /exit, to quit)"
FRAME_S = 0.08  # between two frames of a response in progress
PAUSE = 4  # times the last frame's duration: a long block must not slow its response down
# A response must not control the terminal's cursor, title or colours.
CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def history_file() -> Path | None:
    """Return the path of the file with the user's earlier lines, in the user's data folder; None if
    that file cannot be created."""
    try:
        path = data_dir() / HISTORY
        path.touch(mode=0o600)
        return path if path.is_file() else None
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return None


def typed_lines(history: Path | None, commands: Collection[str]) -> Iterator[str]:
    """Yield each line that the user enters at the prompt, until Ctrl-D or two Ctrl-C in a row.
    `history` is the file with earlier lines; `commands` are completed by Tab."""
    read = _reader(history, commands)
    interrupted = False
    while True:
        try:
            text = read()
        except EOFError:
            return
        except KeyboardInterrupt:
            if interrupted:
                return
            interrupted = True
            print(HINT)
            continue
        interrupted = False
        yield text


def piped_lines() -> Iterator[str]:
    """Yield the lines of standard input; U+FFFD replaces bytes that are not UTF-8."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    with suppress(EOFError):
        while True:
            yield input()


@contextmanager
def hidden_keys() -> Iterator[None]:
    """A context in which the terminal does not show typed keys, so that they do not appear inside a
    response. The next prompt receives them."""
    if not sys.stdin.isatty():
        yield
        return
    saved_attributes = termios.tcgetattr(sys.stdin)
    hidden_attributes = [*saved_attributes]
    hidden_attributes[3] &= ~termios.ECHO
    try:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, hidden_attributes)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, saved_attributes)


def _reader(history: Path | None, commands: Collection[str]) -> Callable[[], str]:
    try:
        return _toolkit_reader(history, commands)
    except ImportError:
        return _readline_reader(history)


def _toolkit_reader(history: Path | None, commands: Collection[str]) -> Callable[[], str]:
    """Make a function that reads the user's next line with prompt_toolkit. Raises ImportError if
    prompt_toolkit is not installed."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    class KeptHistory(FileHistory):
        """prompt_toolkit's history of lines in a file; errors in reading or writing the file are
        ignored, so that they do not end the conversation."""

        def load_history_strings(self) -> Iterable[str]:
            with suppress(OSError):
                return super().load_history_strings()
            return ()

        def store_string(self, string: str) -> None:
            with suppress(OSError):
                super().store_string(string)

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    session: PromptSession[str] = PromptSession(
        SIGN,
        multiline=True,
        prompt_continuation=MORE,
        key_bindings=keys,
        history=KeptHistory(history) if history else InMemoryHistory(),
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
        reserve_space_for_menu=0,
    )
    return session.prompt


def _readline_reader(history: Path | None) -> Callable[[], str]:
    with suppress(ImportError):
        import atexit
        import readline

        if history:
            with suppress(OSError):
                readline.read_history_file(history)
            atexit.register(_write_history, history)

    def read() -> str:
        lines = [input(SIGN)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input(MORE))
        return "\n".join(lines)

    return read


def _write_history(path: Path) -> None:
    import readline

    with suppress(OSError):
        readline.set_history_length(1000)
        readline.write_history_file(path)


class AnswerView(Protocol):
    """Interface that displays one response while it arrives: its reasoning, its text, and a note at
    the end."""

    def think(self, text: str) -> None: ...
    def write(self, text: str) -> None: ...
    def end(self, note: str = "") -> None: ...


class PlainView:
    """Writes a response as plain text while it arrives; writes the model's reasoning only if
    `shows_reasoning`."""

    def __init__(self, out: TextIO, shows_reasoning: bool) -> None:
        self._out = out
        self._shows_reasoning = shows_reasoning
        self._removed_characters = CONTROLS if out.isatty() else {}
        self._at_start = True

    def think(self, text: str) -> None:
        if self._shows_reasoning:
            self.write(text)

    def write(self, text: str) -> None:
        self._at_start = False
        print(text.translate(self._removed_characters), end="", file=self._out, flush=True)

    def end(self, note: str = "") -> None:
        if note and self._out.isatty():
            self.write(note if self._at_start else f" {note}")
        if not self._at_start:
            print(file=self._out, flush=True)
        if note and not self._out.isatty():  # not part of the response
            print(note, file=sys.stderr, flush=True)


class MarkdownView:
    """Renders a response as Markdown on a terminal while it arrives. Redraws the last Markdown
    block; prints earlier blocks once, so that a response longer than the screen scrolls like any
    text."""

    def __init__(self, out: TextIO, shows_reasoning: bool) -> None:
        """`shows_reasoning`: show the model's reasoning instead of a line with its duration. Raises
        ImportError if rich is not installed."""
        from markdown_it import MarkdownIt
        from rich.console import Console

        self._console = Console(file=out, highlight=False)
        self._live: Live | None = None  # while a temporary frame is drawn
        self._parse = MarkdownIt().enable("strikethrough").enable("table").parse
        self._shows_reasoning = shows_reasoning
        self._thought_at: float | None = None  # when the reasoning began
        self._text = ""  # of blocks not yet printed
        self._printed = False
        self._drawn_at = 0.0
        self._pause_s = FRAME_S  # until the next frame

    def think(self, text: str) -> None:
        if self._thought_at is None:
            self._thought_at = time.monotonic()
        if self._shows_reasoning:
            visible_text = text.translate(CONTROLS)
            self._console.print(visible_text, end="", style="dim", markup=False, soft_wrap=True)
        else:
            self._draw(self._dim(f"thinking ... {time.monotonic() - self._thought_at:.0f} s"))

    def write(self, text: str) -> None:
        if self._thought_at is not None:
            self._fold()
        self._text += text.translate(CONTROLS)
        now = time.monotonic()
        if now - self._drawn_at < self._pause_s:
            return
        self._print_finished()
        self._draw(self._tail())
        self._pause_s = max(FRAME_S, PAUSE * (self._drawn_at - now))

    def end(self, note: str = "") -> None:
        if self._thought_at is not None:
            self._fold()
        self._erase()
        if self._text.strip():
            self._print(self._text)
        if note:
            self._console.print(self._dim(note))
        self._console.file.flush()

    def _draw(self, picture: "RenderableType") -> None:
        from rich.live import Live

        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(picture, refresh=True)
        self._drawn_at = time.monotonic()

    def _erase(self) -> None:
        """Erase what is drawn of the unfinished block. The next drawing uses a new rich Live, since
        restarting the old one would erase text printed in between."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _fold(self) -> None:
        """End the display of the reasoning: unless reasoning is shown, replace it with a line that
        says how long it took."""
        assert self._thought_at is not None
        seconds, self._thought_at = time.monotonic() - self._thought_at, None
        self._erase()
        if self._shows_reasoning:
            self._console.print("\n")
        else:
            self._console.print(self._dim(f"thought for {seconds:.1f} s (/reasoning shows it)"))

    def _print_finished(self) -> None:
        """Print all top-level Markdown blocks except the last, which may still grow."""
        starts = [
            token.map[0]
            for token in self._parse(self._text)
            if token.level == 0 and token.nesting >= 0 and token.map
        ]
        if len(starts) < 2:
            return
        lines = self._text.splitlines(keepends=True)
        self._erase()
        self._print("".join(lines[: starts[-1]]))
        self._text = "".join(lines[starts[-1] :])

    def _print(self, text: str) -> None:
        if self._printed:
            self._console.print()
        self._console.print(self._picture(self._rows(text)), end="")
        self._printed = True

    def _tail(self) -> "RenderableType":
        """Render the last lines of the unfinished block, as many as fit on the screen."""
        from rich.console import Group

        picture = self._picture(self._rows(self._text)[-max(1, self._console.height - 3) :])
        return Group("", picture) if self._printed else picture

    def _rows(self, text: str) -> list[list["Segment"]]:
        """Render Markdown text to screen lines, without the empty lines with which some blocks
        begin."""
        from rich.markdown import Markdown

        rows = self._console.render_lines(Markdown(text.rstrip()), pad=False)
        while rows and not any(s.text.strip() or (s.style and s.style.bgcolor) for s in rows[0]):
            del rows[0]
        return rows

    def _picture(self, rows: list[list["Segment"]]) -> "RenderableType":
        from rich.segment import Segment, Segments

        return Segments([part for row in rows for part in (*row, Segment.line())])

    def _dim(self, text: str) -> "RenderableType":
        from rich.text import Text

        return Text(text, style="dim")


def view_on(out: TextIO, shows_reasoning: bool) -> AnswerView:
    """Make the view of a response on `out`: a MarkdownView if `out` is a terminal and rich is
    installed, otherwise a PlainView."""
    if out.isatty():
        with suppress(ImportError):
            return MarkdownView(out, shows_reasoning)
    return PlainView(out, shows_reasoning)
