"""`pdserve top` shows the workers of a running server, refreshed until q."""

import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from pdserve.services.cli.http_client import ApiClient, ApiError, advice, client_of
from pdserve.services.cli.top.fleet import Snapshot, parse_snapshot, rates
from pdserve.services.cli.top.screen import screen
from pdserve.services.options.settings import TopSettings
from pdserve.services.options.sources import Settings

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # alternate screen, no cursor
HOME, CLEAR_LINE, CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"
WAIT_S = 5.0  # timeout of a response
ENDS = (b"q", b"Q", b"\x03", b"\x04")  # q, Ctrl-C, Ctrl-D


def run(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Return 0, or 1 if the server does not respond."""
    chosen = settings.build(TopSettings)
    try:
        client = client_of(chosen, timeout_s=WAIT_S)
        first = fetch_snapshot(client)
    except ApiError as error:
        print(f"pdserve top: {error}{advice(error)}", file=sys.stderr)
        return 1
    if chosen.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("\n".join(screen(client.url, first, None)))
        return 0
    with raw_terminal(), suppress(KeyboardInterrupt):
        watch(client, first, chosen.interval_s)
    return 0


def fetch_snapshot(client: ApiClient) -> Snapshot:
    """Raises ApiError if the server does not respond with pdserve's metrics."""
    try:
        return parse_snapshot(client.get("/metrics?fleet=true").decode())
    except (ValueError, KeyError) as error:
        raise ApiError(f"{client.url}/metrics is not pdserve's: {error}", 502) from None


def watch(client: ApiClient, before: Snapshot, interval_s: float) -> None:
    """Redraw until a key ends it; keeps retrying while the server is unreachable."""
    taken_at = time.monotonic()
    draw([*screen(client.url, before, None, columns()), "", "q ends"])
    while not key_within(interval_s):
        try:
            now = fetch_snapshot(client)
        except ApiError as error:
            draw([f"{client.url}: {error}", "", "it is asked again; q ends"])
            continue
        at = time.monotonic()
        shown = screen(client.url, now, rates(before, now, at - taken_at), columns())
        draw([*shown, "", "q ends"])
        before, taken_at = now, at


def key_within(seconds: float) -> bool:
    """Whether a key that ends the view was pressed in that time."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0]:
            key = os.read(sys.stdin.fileno(), 1)
            if not key or key in ENDS:
                return True
    return False


def columns() -> int:
    return shutil.get_terminal_size().columns


def draw(lines: list[str]) -> None:
    """Draw as many lines and columns as fit in the terminal."""
    width, rows = shutil.get_terminal_size()
    shown = [line[:width] + CLEAR_LINE for line in lines[: rows - 1]]
    sys.stdout.write(HOME + "\r\n".join(shown) + CLEAR_REST)
    sys.stdout.flush()


@contextmanager
def raw_terminal() -> Iterator[None]:
    """Read keys one by one without echo in the block; restores the previous screen afterwards."""
    old = termios.tcgetattr(sys.stdin)
    sys.stdout.write(ENTER)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, old)
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
