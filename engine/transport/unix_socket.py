"""Unix sockets of decode processes, in a folder that prefill also sees, named by decode's
incarnation."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.engine.transport.base import SLOTS, Listener, TransportRefused

_MAX_PATH = 107  # sun_path minus its terminating zero


def socket_path(folder: str, incarnation: bytes, suffix: str) -> Path:
    """Return the path of a decode process's socket. Raises TransportRefused if no folder is set."""
    if not folder:
        raise TransportRefused("no directory for unix sockets is set (--shm-dir)")
    return Path(folder) / f"{incarnation.hex()}{suffix}"


def listen_unix(
    path: Path,
    accepted: Callable[[socket.socket], None],
    cleanup: Callable[[], None] = lambda: None,
) -> Listener:
    """Listen on a unix socket that only this user can connect to; each connection is passed to
    `accepted`. Raises TransportRefused."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as err:
        raise TransportRefused(f"{path.parent}: {err.strerror}") from None
    try:
        with _sun_path(path) as socket_name:
            sock.bind(socket_name)
        path.chmod(0o600)
        sock.listen(2 * SLOTS)
    except OSError as err:
        sock.close()
        raise TransportRefused(f"{path}: {err.strerror}") from None

    def remove() -> None:
        path.unlink(missing_ok=True)
        cleanup()

    return Listener(sock, str(path), accepted, remove)


def dial_unix(path: Path, timeout_s: float) -> socket.socket:
    """Connect to a unix socket and return it without a timeout. Raises TransportRefused if that
    takes longer than `timeout_s` or fails."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        with _sun_path(path) as socket_name:
            sock.connect(socket_name)
        sock.settimeout(None)
    except OSError as err:
        sock.close()
        raise TransportRefused(f"{path}: {err.strerror or err}") from None
    return sock


@contextmanager
def _sun_path(path: Path) -> Iterator[str]:
    """Yield a name of the socket that fits into the 107 bytes that bind and connect accept; for a
    longer path, one below /proc/self/fd of its open directory."""
    if len(os.fsencode(path)) <= _MAX_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
