"""A TCP proxy between two processes with the faults of networks.

A partition holds bytes instead of losing them: TCP would send them again afterwards. The test
begins and ends every fault, from its own thread; `hits` counts where faults occurred.
"""

import asyncio
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from enum import Enum

CHUNK_BYTES = 1 << 16
UNHARMED = (0, 1, False)
_NO_LINGER = struct.pack("ii", 1, 0)  # close sends a reset


class Way(Enum):
    THERE = "there"  # from the dialing side to the target
    BACK = "back"


class _Connection:
    """Two sockets and the bytes between them."""

    def __init__(self, dialled: socket.socket, target: socket.socket) -> None:
        self.ends = {Way.THERE: (dialled, target), Way.BACK: (target, dialled)}
        self.cut = {way: asyncio.Event() for way in Way}  # nothing more passes that way

    def close(self, reset: bool = False) -> None:
        for sock in self.ends[Way.THERE]:
            with suppress(OSError):
                if reset:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            sock.close()


class FaultProxy:
    """Listens from its construction on; use as a context manager. `target` may be set later."""

    def __init__(self, target: str = "") -> None:
        self.target = target
        self.hits: Counter[str] = Counter()
        self.num_connections = 0
        self._delay_s = 0.0
        self._flips: dict[Way, tuple[int, int, bool]] = dict.fromkeys(Way, UNHARMED)
        self._flows = {way: asyncio.Event() for way in Way}
        for flows in self._flows.values():
            flows.set()
        self._connections: dict[asyncio.Task[None], _Connection] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> "FaultProxy":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the proxy and every connection."""
        self._loop.call_soon_threadsafe(self._accepting.cancel)
        self._thread.join()

    # --- faults, begun and ended from any thread

    def delay(self, seconds: float) -> None:
        """Delay all bytes read from now on by this time, in order."""
        self._do(lambda: setattr(self, "_delay_s", seconds))

    def hold(self, *ways: Way) -> None:
        """Start a partition, one-way if a direction is named: nothing passes until `heal`, no
        connection breaks, and new ones seem to open.
        """
        self._do(lambda: [self._flows[way].clear() for way in ways or Way])

    def corrupt(self, way: Way, count: int = 1, least_bytes: int = 1, head: bool = False) -> None:
        """Flip a bit in the middle of the next `count` chunks of `least_bytes` or more; `head`:
        the first bit. A chunk of a gRPC connection begins with the length of an HTTP/2 frame."""
        self._do(lambda: self._flips.update({way: (count, least_bytes, head)}))

    def half_close(self, way: Way) -> None:
        """End that direction of every connection; the other one stays open."""

        def cut() -> None:
            for connection in self._connections.values():
                self.hits["half-closed"] += not connection.cut[way].is_set()
                connection.cut[way].set()

        self._do(cut)

    def reset(self) -> None:
        """Reset every connection."""

        def cut() -> None:
            self.hits["reset"] += len(self._connections)
            for task, connection in self._connections.items():
                connection.close(reset=True)
                task.cancel()

        self._do(cut)

    def heal(self) -> None:
        """End lasting faults: delay, partition, bits not flipped yet."""

        def heal() -> None:
            self._delay_s = 0.0
            self._flips = dict.fromkeys(Way, UNHARMED)
            for flows in self._flows.values():
                flows.set()

        self._do(heal)

    def _do(self, change: Callable[[], object]) -> None:
        """Run a function on the proxy's thread, and wait for it."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (change(), done.set()))
        done.wait()

    # --- on the proxy's thread

    def _run(self) -> None:
        self._accepting = self._loop.create_task(self._accept())
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._accepting)
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        left = list(self._connections)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        while True:
            dialled, _ = await self._loop.sock_accept(self._listener)
            target = socket.socket()
            for sock in (dialled, target):
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(dialled, target)
            task = self._loop.create_task(self._serve(connection))
            self._connections[task] = connection
            self.num_connections += 1

    async def _serve(self, connection: _Connection) -> None:
        _, target = connection.ends[Way.THERE]
        host, _, port = self.target.rpartition(":")
        try:
            await self._loop.sock_connect(target, (host, int(port)))
            async with asyncio.TaskGroup() as ways:
                for way in Way:
                    ways.create_task(self._carry(connection, way))
        except* OSError:
            pass  # the close informs the other end
        finally:
            connection.close()
            del self._connections[asyncio.current_task()]  # type: ignore[arg-type]

    async def _carry(self, connection: _Connection, way: Way) -> None:
        """Carry one direction, until its end of file or a half-close."""
        moving = asyncio.create_task(self._move(connection, way))
        cutting = asyncio.create_task(connection.cut[way].wait())
        try:
            await asyncio.wait((moving, cutting), return_when=asyncio.FIRST_COMPLETED)
            if not cutting.done():
                moving.result()
        finally:
            for job in (moving, cutting):
                job.cancel()
            await asyncio.gather(moving, cutting, return_exceptions=True)
        connection.ends[way][1].shutdown(socket.SHUT_WR)

    async def _move(self, connection: _Connection, way: Way) -> None:
        source, sink = connection.ends[way]
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._read(source, queue, way))
                both.create_task(self._write(sink, queue, way))
        except* OSError as broken:
            raise broken.exceptions[0] from None

    async def _read(
        self, source: socket.socket, queue: "asyncio.Queue[tuple[float, bytes]]", way: Way
    ) -> None:
        data = b"first"
        while data:
            data = await self._loop.sock_recv(source, CHUNK_BYTES)
            if self._delay_s and data:
                self.hits["delayed"] += 1
            await queue.put((self._loop.time() + self._delay_s, self._flipped(data, way)))

    async def _write(
        self, sink: socket.socket, queue: "asyncio.Queue[tuple[float, bytes]]", way: Way
    ) -> None:
        while True:
            due, data = await queue.get()
            if due > self._loop.time():
                await asyncio.sleep(due - self._loop.time())
            if not self._flows[way].is_set():
                self.hits[f"held {way.value}"] += 1
                await self._flows[way].wait()
            if not data:
                return
            await self._loop.sock_sendall(sink, data)

    def _flipped(self, data: bytes, way: Way) -> bytes:
        count, least_bytes, head = self._flips[way]
        if not count or len(data) < least_bytes:
            return data
        self._flips[way] = (count - 1, least_bytes, head)
        self.hits["corrupted"] += 1
        changed = bytearray(data)
        changed[0 if head else len(data) // 2] ^= 0x80
        return bytes(changed)
