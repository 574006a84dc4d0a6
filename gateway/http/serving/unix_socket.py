"""The gateway's Unix socket: only processes of its user can open it, and no browser can."""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator


@contextlib.contextmanager
def unix_listener(path: str) -> Iterator[socket.socket | None]:
    """A socket that listens at `path`, which is removed at the end; None for an empty path.

    A socket that a dead process has left there is replaced. Raises OSError naming the path: it is
    another file, a server answers there, or the folder cannot be written.
    """
    if not path:
        yield None
        return
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener:
        try:
            _remove_stale(path)
            listener.bind(path)
            os.chmod(path, 0o600)  # nobody can connect before it listens
            listener.listen()
            made = os.stat(path)
        except OSError as error:
            why = error.strerror or str(error)
            raise OSError(error.errno, f"cannot listen on {path}: {why}") from error
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(path), made):  # no other server has taken it over
                    os.unlink(path)


def _remove_stale(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(0, "there is a file that is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise FileExistsError(0, "another server listens there")
