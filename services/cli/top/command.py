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
    options = settings.build(TopSettings)
    try:
        client = client_of(options, timeout_s=WAIT_S)
        first = fetch_snapshot(client)
    except ApiError as error:
        print(f"pdserve top: {error}{advice(error)}", file=sys.stderr)
        return 1
    if options.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("\n".join(screen(client.url, first, None)))
        return 0
    with raw_terminal(), suppress(KeyboardInterrupt):
        watch(client, first, options.interval_s)
    return 0


def fetch_snapshot(client: ApiClient) -> Snapshot:
    """Raises ApiError if the server does not respond with pdserve's metrics."""
    try:
        return parse_snapshot(client.get("/metrics?fleet=true").decode())
    except (ValueError, KeyError) as error:
        raise ApiError(
            f"{client.url}/metrics does not return pdserve's metrics: {error}", 502
        ) from None


def watch(client: ApiClient, previous: Snapshot, interval_s: float) -> None:
    """Redraw until a key ends it; keeps retrying while the server is unreachable."""
    previous_at = time.monotonic()
    draw([*screen(client.url, previous, None, columns()), "", "press q to quit"])
    while not key_within(interval_s):
        try:
            current = fetch_snapshot(client)
        except ApiError as error:
            draw([f"{client.url}: {error}", "", "retrying; press q to quit"])
            continue
        current_at = time.monotonic()
        lines = screen(
            client.url, current, rates(previous, current, current_at - previous_at), columns()
        )
        draw([*lines, "", "press q to quit"])
        previous, previous_at = current, current_at


def key_within(seconds: float) -> bool:
    """Whether a key that ends the view was pressed in that time."""
    deadline = time.monotonic() + seconds
    while (remaining_s := deadline - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], remaining_s)[0]:
            key = os.read(sys.stdin.fileno(), 1)
            if not key or key in ENDS:
                return True
    return False


def columns() -> int:
    return shutil.get_terminal_size().columns


def draw(lines: list[str]) -> None:
    """Draw as many lines and columns as fit in the terminal."""
    width, rows = shutil.get_terminal_size()
    visible_lines = [line[:width] + CLEAR_LINE for line in lines[: rows - 1]]
    sys.stdout.write(HOME + "\r\n".join(visible_lines) + CLEAR_REST)
    sys.stdout.flush()


@contextmanager
def raw_terminal() -> Iterator[None]:
    """Read keys one by one without echo in the block; restores the previous screen afterwards."""
    saved_attributes = termios.tcgetattr(sys.stdin)
    sys.stdout.write(ENTER)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved_attributes)
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
