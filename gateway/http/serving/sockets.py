"""The sockets at which a gateway listens. Only processes of its user can open its Unix socket, and
no browser can."""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator


def host_port(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises OSError naming the address."""
    sock = _bound(host, port, socket.SO_REUSEADDR)
    try:
        sock.listen()  # from here on connections wait until they are served
    except OSError as error:
        sock.close()
        raise _cannot_listen(host, port, error) from error
    return sock


def hold_port(host: str, port: int) -> socket.socket:
    """Return a socket that never listens; while it is open, several processes may listen at its
    port together (SO_REUSEPORT). Raises OSError naming the address if another process holds it or
    listens there."""
    if port:
        listen(host, port).close()  # the one below would share it
    try:
        return _bound(host, port, socket.SO_REUSEPORT)
    except OSError:  # connections of a gateway that did not share the port still exist
        return _bound(host, port, socket.SO_REUSEPORT, socket.SO_REUSEADDR)


def _bound(host: str, port: int, *options: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in options:
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise _cannot_listen(host, port, error) from error
    return sock


def _cannot_listen(host: str, port: int, error: OSError) -> OSError:
    return OSError(error.errno, f"cannot listen on {host_port(host, port)}: {error.strerror}")


@contextlib.contextmanager
def unix_listener(path: str) -> Iterator[socket.socket | None]:
    """Yield a socket that listens at `path`, which is removed at the end; None for an empty path.

    Replaces a socket that a dead process has left there. Raises OSError naming the path if it is
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
            os.chmod(path, 0o600)  # before it listens, so no other user can connect
            listener.listen()
            created = os.stat(path)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(error.errno, f"cannot listen on {path}: {reason}") from error
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(path), created):  # no other server has taken it over
                    os.unlink(path)


def _remove_stale(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(0, "the path exists and is not a socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise FileExistsError(0, "another server is listening there")
