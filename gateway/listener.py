"""Listening sockets of the gateway, and the listener that accepts its HTTP connections.

The listener accepts connections until it is closed, and retries after any error. Among several
gateway processes, the one with the fewest connections accepts the next, so that even a few long
connections are spread evenly. The counts are in memory that the processes share through a file;
each process writes only its own count. One client address may have half of all connections, and the
other addresses share the rest (FairShare); excess connections are closed at once. An IPv6 network
of 64 bits counts as one address, since it has one owner.

Only processes of the same user can open a gateway's Unix socket, and no browser can. This module
imports no HTTP library, because the parent of several gateway processes, which holds their ports,
uses it.
"""

import asyncio
import contextlib
import ipaddress
import logging
import math
import mmap
import os
import resource
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path

from pdserve.services.common.fairness import FairShare


def host_port(host: str, port: int) -> str:
    """Return `host:port`; an IPv6 address is put in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens on the address. Raises OSError that names the address."""
    sock = _bound(host, port, socket.SO_REUSEADDR)
    try:
        sock.listen()  # from here on connections wait until they are served
    except OSError as error:
        sock.close()
        raise _cannot_listen(host, port, error) from error
    return sock


def hold_port(host: str, port: int) -> socket.socket:
    """Reserve a TCP port: return a bound socket that never listens. While it is open, several
    processes may listen on the port together (SO_REUSEPORT). Raises OSError that names the address
    if another process uses the port."""
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
    """Yield a Unix socket that listens at `path`; the path is removed at the end. Yields None if
    `path` is empty.

    Replaces the socket of a process that has ended. Raises OSError that names the path if the path
    is another type of file, if a server still listens there, or if the folder is not writable.
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
    raise FileExistsError(0, "another server listens on this path")


UNREADY = 1 << 20  # added to the count of an unready process, so that all others have fewer
_ITEM_BYTES = 4
log = logging.getLogger(__name__)
MAX_CONNECTIONS = 4096
OTHER_FILES = 1256  # other open files: sessions, tokenizer workers, 1,000 gRPC connections
PAUSE_S = 1.0  # while no connection can be accepted
YIELD_S = 0.005  # for a process with fewer connections to accept one; it does at once unless busy
BATCH = 64  # connections in one pass of the loop
FULL_LOG_S = 10.0  # between log lines about missing room


class ConnectionCounts:
    """The number of open connections of each of `num` gateway processes, in a file at `path` that
    they share. `index` is the number of this process, which is not ready to accept at first. Raises
    OSError."""

    def __init__(self, path: Path, index: int, num: int) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.truncate(file, num * _ITEM_BYTES)  # keeps what the others have written
            self._all = memoryview(mmap.mmap(file, num * _ITEM_BYTES)).cast("i")
        finally:
            os.close(file)
        self._index = index
        self._all[index] = UNREADY

    def set_ready(self) -> None:
        """Mark this process as ready to accept connections."""
        self._all[self._index] -= UNREADY

    def set_unready(self) -> None:
        """Mark this process as not ready to accept connections; those it has open still count."""
        self._all[self._index] += UNREADY

    def add(self, num: int) -> None:
        """Add `num`, which may be negative, to the connection count of this process."""
        self._all[self._index] += num

    def fewer(self) -> dict[int, int]:
        """Return the processes with fewer connections than this one, as counts by process index."""
        own = self._all[self._index]
        return {index: count for index, count in enumerate(self._all) if count < own}

    def have_changed(self, counts: Mapping[int, int]) -> bool:
        """Return whether any of these processes has another count than in `counts`, which shows
        that it is alive. `counts` are earlier counts by process index."""
        return any(self._all[index] != count for index, count in counts.items())


class HttpListener:
    """Accepts connections and passes each to the coroutine `serve`, which returns when the
    connection has ended.

    It replaces uvloop's own server, which closes its listening socket after some errors, and drops
    waiting connections while the process cannot open more files.
    """

    def __init__(
        self,
        sock: socket.socket,
        serve: Callable[[socket.socket], Awaitable[None]],
        limit: int,
        counts: ConnectionCounts | None = None,
    ) -> None:
        """Start to accept connections. `sock` is bound and listens; the caller closes it. `limit`
        is the maximum number of open connections. `counts` are the counts of all processes that
        accept on this socket, None for a single process."""
        sock.setblocking(False)
        self._sock = sock
        self._serve = serve
        self._open = FairShare(limit // 2)  # all together may have twice as much
        self._limit = limit
        self._counts = counts
        self._num_refused = 0  # since the last log line about missing room
        self._logged_at = -math.inf  # of that log line, by the loop's clock
        self._serving: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._resume()

    def close(self) -> None:
        """Stop accepting connections. Open connections continue."""
        self._loop.remove_reader(self._sock)
        if self._pause is not None:
            self._pause.cancel()
        if self._counts is not None:
            self._counts.set_unready()

    def _accept(self) -> None:
        for _ in range(BATCH):
            if self._counts is not None and (fewer := self._counts.fewer()):
                self._pause_for(YIELD_S, partial(self._accept_late, self._counts, fewer))
                return
            if not self._accept_one():
                return

    def _accept_late(self, counts: ConnectionCounts, fewer: Mapping[int, int]) -> None:
        """Accept connections after a pause that let processes with fewer connections accept first.

        Accepts none if such a process is alive. `fewer` has the counts of those processes at the
        beginning of the pause.
        """
        self._resume()
        if counts.fewer() and counts.have_changed(fewer):
            return
        for _ in range(BATCH):
            if not self._accept_one():
                return

    def _accept_one(self) -> bool:
        """Accept one connection, or close it at once if too many are open. Returns False if no
        connection waits or the system cannot accept one."""
        try:
            connection, address = self._sock.accept()
        except BlockingIOError:
            return False
        except ConnectionAbortedError:
            return True
        except OSError as error:
            log.warning("cannot accept HTTP connections, retrying: %s", error)
            self._pause_for(PAUSE_S, self._resume)
            return False
        owner = _owner(address[0]) if address else b""  # all of a Unix socket share one
        if not self._has_room(owner):
            connection.close()
            return True
        connection.setblocking(False)
        self._open.take(owner)
        if self._counts is not None:
            self._counts.add(1)
        task = self._loop.create_task(self._hold(connection, owner))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        return True

    def _pause_for(self, seconds: float, callback: Callable[[], None]) -> None:
        self._loop.remove_reader(self._sock)
        self._pause = self._loop.call_later(seconds, callback)

    def _resume(self) -> None:
        self._loop.add_reader(self._sock, self._accept)

    def _has_room(self, owner: bytes) -> bool:
        has_room = self._open.total < self._limit and self._open.has_room(owner)
        self._num_refused += not has_room
        if not has_room and self._loop.time() - self._logged_at >= FULL_LOG_S:
            log.warning(
                "rejected %d new HTTP connections: too many are open (%d)",
                self._num_refused,
                self._open.total,
            )
            self._num_refused = 0
            self._logged_at = self._loop.time()
        return has_room

    async def _hold(self, connection: socket.socket, owner: bytes) -> None:
        try:
            await self._serve(connection)
        finally:
            self._open.give_back(owner)
            if self._counts is not None:
                self._counts.add(-1)


def max_connections() -> int:
    """Return the maximum number of HTTP connections: MAX_CONNECTIONS, or fewer if the process's
    limit on open files leaves room for fewer."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(files // 2, files - OTHER_FILES))


@lru_cache(MAX_CONNECTIONS)
def _owner(host: str) -> bytes:
    """Return the key under which the connections of a client address are counted: the IPv4 address,
    or the first 64 bits of an IPv6 address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return address.packed[:8]
    return address.packed
