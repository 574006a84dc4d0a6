"""Reads the user's lines: with prompt_toolkit they are editable and may span several lines; without
it, readline's."""

import io
import sys
import termios
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pdserve.cli.up import data_dir

SIGN, MORE = "> ", ". "
HISTORY = "chat_history"
HINT = "(press Ctrl-C again or Ctrl-D, or type /exit, to quit)"


def history_file() -> Path | None:
    """The history file in the user's data folder; None if it cannot be kept."""
    try:
        path = data_dir() / HISTORY
        path.touch(mode=0o600)
        return path if path.is_file() else None
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return None


def typed_lines(history: Path | None, commands: Collection[str]) -> Iterator[str]:
    """Yield the lines that the user enters, until Ctrl-D or two Ctrl-C."""
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
    """Hide typed keys in the block, so that they do not appear in a response; the next prompt
    receives them."""
    if not sys.stdin.isatty():
        yield
        return
    saved_attributes = termios.tcgetattr(sys.stdin)
    hidden_attributes = [
        *saved_attributes[:3],
        saved_attributes[3] & ~termios.ECHO,
        *saved_attributes[4:],
    ]
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
    """Raises ImportError without prompt_toolkit."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    class KeptHistory(FileHistory):
        """A history file whose read and write errors do not end the conversation."""

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
