"""A program in a pseudo terminal, and the contents of its screen."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

LIMIT_S = 60.0
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[=>78]|\([AB0])")
ROWS, COLUMNS = 40, 100
# Queries to a terminal that must be answered, as prompt_toolkit sends them at its start.
WHERE_IS_THE_CURSOR, IT_IS_HERE = b"\x1b[6n", b"\x1b[40;1R"  # in the last row


CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n|([^\x1b\r\n]+)")


def on_screen(written: str) -> list[str]:
    """Return the lines that an endless terminal shows after this; it knows the sequences that rich
    uses.
    """
    lines, row, column = [""], 0, 0
    for found in CONTROL.finditer(written):
        number, command, text = found.groups()
        if text:
            lines[row] = lines[row].ljust(column)
            lines[row] = lines[row][:column] + text + lines[row][column + len(text) :]
            column += len(text)
        elif found[0] == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif found[0] == "\r":
            column = 0
        elif command == "A":
            row = max(0, row - int(number or 1))
        elif command == "K":
            lines[row] = "" if number == "2" else lines[row][:column]
        else:
            assert command in "mhl", found[0]
    return [line.rstrip() for line in lines]


class Terminal:
    """The user's side: types, and waits for words to appear."""

    def __init__(self, process: "subprocess.Popen[bytes]", descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._written = b""
        self._seen = 0  # characters that have been waited for

    @property
    def text(self) -> str:
        """Return everything written so far, without colours and moves."""
        return ESCAPES.sub("", self._written.decode(errors="replace"))

    @property
    def screen(self) -> list[str]:
        """Return the lines that remain on an endless screen."""
        return on_screen(self._written.decode(errors="replace"))

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def enter(self, line: str) -> None:
        self.type(line + "\r")

    def wait_for(self, words: str) -> str:
        """Return the output up to these words, after what was waited for before."""
        deadline = time.monotonic() + LIMIT_S
        while (at := self.text.find(words, self._seen)) < 0:
            assert self._read(deadline), f"no {words!r} in:\n{self.text}"
        found = self.text[self._seen : at + len(words)]
        self._seen = at + len(words)
        return found

    def end(self) -> int:
        """Return its exit code, once it has ended by itself."""
        deadline = time.monotonic() + LIMIT_S
        while self._read(deadline):
            pass
        return self.process.wait(LIMIT_S)

    def _read(self, deadline: float) -> bool:
        """Read output; False if the program has closed the terminal, or writes nothing until the
        deadline.
        """
        ready, _, _ = select.select([self._descriptor], [], [], max(0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self._descriptor, 65536)
        except OSError:  # EIO: the other end is closed
            return False
        self._written += data
        if WHERE_IS_THE_CURSOR in data:
            os.write(self._descriptor, IT_IS_HERE)
        return bool(data)


@contextmanager
def in_terminal(command: Sequence[str], env: dict[str, str] | None = None) -> Iterator[Terminal]:
    """Run the program as the leader of a session with its own terminal."""
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        ["setsid", "--ctty", *command],
        stdin=its,
        stdout=its,
        stderr=its,
        env={**os.environ, "TERM": "xterm-256color", **(env or {})},
    )
    os.close(its)
    try:
        yield Terminal(process, mine)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(mine)
