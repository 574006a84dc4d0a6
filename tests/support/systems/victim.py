"""Decode's side for the tests of frames: a real Receiver over an engine that computes nothing."""

import hashlib
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from builders.engine_kit import ask, fake_engine

from pdserve.engine.handoff.connection import DataLink
from pdserve.engine.handoff.protocol import FrameHeader, Ticket
from pdserve.engine.handoff.receiver import Receiver
from pdserve.engine.thread import EngineThread
from pdserve.engine.transport import Payload, Target, TransportOptions, make_transports
from systems.eventually import LIMIT_S, wait_until
from systems.no_timeouts import no_timeouts

NUM_TOKENS = 60  # of every prompt; 15 blocks in each group
BLOCK = 4
SLOT_BYTES = 1 << 16


class Watched(Receiver):
    """`taking`: connections with a frame between its record and its outcome. A connection that
    fails at its writer thread is closed while its reader still takes a frame.
    """

    def __init__(self, *args: Any, **words: Any) -> None:
        self._taking: set[DataLink] = set()
        super().__init__(*args, **words)

    @property
    def taking(self) -> list[DataLink]:
        return [link for link in self._taking.copy() if not link.ended]

    def frame(self, link: DataLink, header: FrameHeader, covered: bytes, tag: bytes) -> bool:
        self._taking.add(link)
        wanted = super().frame(link, header, covered, tag)
        if not wanted:
            self._taking.discard(link)
        return wanted

    def payload(self, link: DataLink, header: FrameHeader, payload: Payload) -> None:
        super().payload(link, header, payload)
        self._taking.discard(link)


class Victim:
    """Decode's side, to be used with `with`: it ends though its test fails, since no time limit
    holds in this process until then. `lost` holds the reasons by attempt; `writes` counts writes
    into the pool.
    """

    def __init__(self, transport: str, folder: Path, encrypted: bool = False) -> None:
        self.engine = fake_engine(num_blocks=256, block_size=BLOCK, window=48, prefix_cache=False)
        self.spec = self.engine.kv.spec
        self.incarnation = os.urandom(16)
        self.encrypted = encrypted
        self.lost: dict[bytes, str] = {}
        self.received: list[Any] = []
        self.writes = 0
        self._timeouts = ExitStack()
        write = self.engine.kv.write

        def counted(*args: Any) -> None:
            self.writes += 1
            write(*args)

        self.engine.kv.write = counted  # type: ignore[method-assign]
        self.thread = EngineThread(self.engine, lambda step: None)
        self.receiver = Watched(
            self.engine,
            self.engine.kv,
            incarnation=self.incarnation,
            identity=self.engine.kv_identity,
            on_received=self.received.append,
            on_lost=self._lost,
            wake=self.thread.wake,
            liveness=lambda: self.thread.liveness,
            encrypted=encrypted,
        )
        options = TransportOptions("127.0.0.1:0", str(folder), SLOT_BYTES)
        (self.transport,) = make_transports(transport, options)
        addresses = self.receiver.listen([self.transport], True)
        self.target = Target(addresses.get("tcp", ""), self.incarnation)
        self.thread.add_poll(self.receiver.poll)
        self.thread.start()
        self.receiver.start()

    def admit(self, prefill_incarnation: bytes) -> Ticket:
        request = ask(os.urandom(16).hex(), [7] * (NUM_TOKENS + 1))
        attempt = bytes.fromhex(request.key)
        ticket = self.thread.post(
            lambda _: self.receiver.admit(attempt, request, prefill_incarnation, float("inf"))
        ).result(LIMIT_S)
        assert ticket is not None, "busy"
        return ticket

    def state(self, tickets: list[bytes]) -> dict[str, Any]:
        """Return the hash of every byte of the pool, and the bitmaps of these live tickets."""

        def read(_: Any) -> dict[str, Any]:
            pool = hashlib.sha256()
            for data in self.engine.kv.data:
                pool.update(data.tobytes())
            bitmaps = {
                live.ticket.id.hex(): repr(live.bitmap._present)
                for live in self.receiver.live
                if live.ticket.id in tickets and live.bitmap
            }
            return {"pool": pool.hexdigest(), "bitmaps": bitmaps, "writes": self.writes}

        self.settle()
        found: dict[str, Any] = self.thread.post(read).result(LIMIT_S)
        return found

    def settle(self) -> None:
        """Wait until every credited payload is written or dropped, and the result is known."""
        wait_until(lambda: not self.receiver.taking, pause_s=0.0002)
        self.thread.post(lambda _: None).result(LIMIT_S)  # the poll follows

    def wait(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, self.lost, pause_s=0.0005)

    def __enter__(self) -> "Victim":
        self._timeouts.enter_context(no_timeouts())
        return self

    def __exit__(self, *failure: object) -> None:
        with self._timeouts:  # restored, whatever fails before
            self.thread.close()
            self.receiver.close()

    def _lost(self, attempt: bytes, reason: str) -> None:
        self.lost[attempt] = reason
