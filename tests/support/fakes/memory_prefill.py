"""A prefill process in one thread, which dials a Receiver over connections in memory."""

import os
from collections import Counter
from functools import partial
from typing import Any, Protocol

from builders.engine_kit import fake_engine

from fakes.memory_link import MemoryLink, tie
from pdserve.engine.handoff.outgoing import Sent
from pdserve.engine.handoff.protocol import messages, slot_bytes
from pdserve.engine.handoff.receiver import Receiver
from pdserve.engine.handoff.sender import Sender
from pdserve.engine.transport import Target, TransportRefused


class World(Protocol):
    """State shared by the processes."""

    receiver: Receiver
    steps: int  # decode's counter

    def clock(self) -> float: ...


class Later:
    """An executor that runs nothing by itself."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def submit(self, fn: Any, *words: Any) -> None:
        self.calls.append(partial(fn, *words))

    def shutdown(self) -> None:
        self.calls.clear()


class Worker:
    """A prefill process; it dials when its owner calls `dial`."""

    def __init__(self, world: World, num_blocks: int, window: int) -> None:
        self.world = world
        self.incarnation = os.urandom(16)
        self.engine = fake_engine(
            num_blocks=num_blocks, window=window, chunk_size=8, clock=world.clock
        )
        self.refusals: Counter[str] = Counter()
        self.refuses = False
        self.num_refused = 0
        self.links: list[MemoryLink] = []
        self.sent: dict[bytes, Sent] = {}
        self.sender = Sender(
            self.engine,
            self.engine.kv,
            (),
            incarnation=self.incarnation,
            identity=self.engine.kv_identity,
            on_ended=self.ended,
            wake=lambda: None,
            liveness=lambda: world.steps,
            passes_over=lambda key: False,
            clock=world.clock,
        )
        self.sender._slot_bytes = 1  # a frame for each block of each layer
        self.dials = Later()
        self.sender._dial_threads.shutdown()
        self.sender._dial_threads = self.dials  # type: ignore[assignment]
        self.sender._dialer = self  # type: ignore[assignment]

    def dial(self, target: Target, hello: messages.Hello) -> MemoryLink:
        """Implements Dialer.dial."""
        if self.refuses:
            self.num_refused += 1
            raise TransportRefused("no listener")
        world = self.world
        size = slot_bytes(self.engine.kv.spec)
        here = MemoryLink(self.sender, target.incarnation, size, world.clock)
        there = MemoryLink(world.receiver, hello.prefill_incarnation, size, world.clock)
        tie(here, there)
        there.hello = hello
        assert not world.receiver.introduced(there, hello)
        self.links.append(here)
        return here

    def ended(self, sent: Sent) -> None:
        assert sent.attempt not in self.sent, "the end is reported twice"
        self.sent[sent.attempt] = sent
