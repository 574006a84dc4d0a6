"""A process of workers without engines that speak the whole protocol: `fake_workers.py CERTIFICATES
SHAPE FILE ROUTER...`.

Their messages are as large and as frequent as those of real workers of the Shape (JSON). They join
through the product's Membership and share one event loop; a decode worker steps independently, once
for each token of a stream. The model that they claim to serve has one token per byte, `MARKS` of
them printable. The process prints `ready` when all listen, and exits on SIGTERM, writing the
arrival time (time.monotonic) of each Admit by request to FILE, as JSON.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import uvloop
from builders.byte_tokenizer import CHAT_TEMPLATE, VOCAB_SIZE, write_tokenizer
from scale.shape import BLOCK, IDENTITY, MARKS, MODEL, Shape, held_by
from systems.single_processes import trusted

from pdserve.engine.kv import KvSpec, encode_spec
from pdserve.protos import common_pb2 as pb
from pdserve.protos import fleet_pb2
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.common_pb2_grpc import add_BlobsServicer_to_server
from pdserve.protos.worker_pb2_grpc import (
    DecodeServicer,
    PrefillServicer,
    add_DecodeServicer_to_server,
    add_PrefillServicer_to_server,
)
from pdserve.services.common.auth.access import Access
from pdserve.services.common.auth.certificates import Role
from pdserve.services.common.rpc import (
    PROTOCOL_VERSION,
    BlobCache,
    BlobsServicer,
    IdsCollector,
    NumberedChoice,
    Outbox,
    TokensOutbox,
    blob_digest,
)
from pdserve.services.common.server import GrpcServer
from pdserve.services.worker.membership import Membership
from pdserve.services.worker.process import IDLE_LOAD_S, LOAD_S

GetBlob = Callable[[str], Awaitable[bytes | None]]


def model() -> tuple[pb.ModelCard, BlobCache]:
    """Its card, and the files that the card names."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        tokenizer = (Path(folder) / "tokenizer.json").read_bytes()
    template = CHAT_TEMPLATE.encode()
    blobs = BlobCache()
    blobs.add(tokenizer)
    blobs.add(template)
    card = pb.ModelCard(
        name=MODEL,
        architecture="Fake",
        context_len=8192,
        vocab_size=VOCAB_SIZE,
        tokenizer_digest=blob_digest(tokenizer),
        template_digest=blob_digest(template),
        kv_identity=pb.KvIdentity(digest=IDENTITY, weights="ab" * 32, numerics="none"),
        kv_spec=encode_spec(KvSpec(BLOCK, ())),
        created=1,
        weights_bytes=1,
    )
    return card, blobs


BLOCKS_TOTAL = 60_000
PREFILL_S = 0.05  # from PrefillStart to the last block
HASH_BYTES = 16
PREFILL_TOKENS_S = 50_000.0


@dataclass(eq=False, slots=True)
class Stream:
    """One attempt at a decode worker."""

    outbox: TokensOutbox[wire.DecodeEvent]
    choice: NumberedChoice
    num_tokens: int
    prompt_len: int
    remote: bool
    position: int = 0


class Exchange:
    """Transfers from prefill workers, which are in one process with the decode workers. Also
    records when each Admit arrived."""

    def __init__(self) -> None:
        self.admitted: dict[str, float] = {}  # when, by request
        self._waiting: dict[bytes, Callable[[], None]] = {}  # by ticket

    def expect(self, ticket: bytes, arrived: Callable[[], None]) -> None:
        self._waiting[ticket] = arrived

    def deliver(self, ticket: bytes) -> None:
        if arrived := self._waiting.pop(ticket, None):
            arrived()


class FakeWorker:
    """Join the routers and report, like a worker with its share of all routers' streams."""

    role: fleet_pb2.Role
    peers: int  # workers of its role

    def __init__(self, number: int, access: Access, card: pb.ModelCard, shape: Shape) -> None:
        self.shape = shape
        self.incarnation = os.urandom(16)
        self.host = GrpcServer(access)
        self.rng = Random(number)
        self.load = fleet_pb2.Load(blocks_total=BLOCKS_TOTAL)
        self.changed = True
        self._access, self._card = access, card
        held = held_by(number, shape)[: shape.hashes]
        fresh = new_hashes(shape.hashes - len(held))
        self._added = [*held, *fresh]
        self._removed: list[bytes] = []
        self._hashes = deque(fresh)
        self._commands = 0.0  # of other routers, until the next turn
        self._waited = 0.0
        self._turns = 0
        self._said = fleet_pb2.Load()

    @property
    def others(self) -> float:
        """Commands of the other routers per second."""
        return (self.shape.routers - 1) * self.shape.starts_s / self.peers

    async def start(self, routers: list[str], get_blob: GetBlob) -> None:
        add_BlobsServicer_to_server(BlobsServicer(get_blob), self.host.server)
        address = f"127.0.0.1:{self.host.listen('127.0.0.1:0')}"
        await self.host.start()
        hello = fleet_pb2.WorkerHello(
            role=self.role,
            incarnation=self.incarnation,
            address=address,
            data_address=address,
            card=self._card,
            transports=["tcp"],
            wire_version=1,
            protocol=PROTOCOL_VERSION,
            block_size=BLOCK,
        )
        self._membership = Membership(
            hello, routers, self._access, lambda: (self._turns, bool(self.shape.streams))
        )
        self._report()
        self._membership.start()
        asyncio.get_running_loop().call_later(self.rng.uniform(0, 2 * LOAD_S), self._turn)

    def commanded(self, attempt: bytes) -> None:
        self.load.last_command = attempt
        self.changed = True

    def cache(self, num_blocks: int) -> None:
        """Add this many new blocks to the cache, and remove as many old ones."""
        fresh = new_hashes(num_blocks)
        self._added += fresh
        self._hashes.extend(fresh)
        self._removed += [self._hashes.popleft() for _ in fresh]

    def _turn(self) -> None:
        asyncio.get_running_loop().call_later(LOAD_S, self._turn)
        self._turns += 1
        self._commands += LOAD_S * self.others
        while self._commands >= 1:
            self._commands -= 1
            self.commanded(self.rng.randbytes(HASH_BYTES))
            self.of_another_router()
        self.turn()
        self._waited += LOAD_S
        if self.changed or self._waited >= IDLE_LOAD_S:
            self.changed, self._waited = False, 0.0
            self._report()

    def _report(self) -> None:
        self._membership.prefixes(self._added, self._removed)
        self._added, self._removed = [], []
        if self.load != self._said:
            self._said.CopyFrom(self.load)
            load = fleet_pb2.Load()
            load.CopyFrom(self.load)
            self._membership.report(load)

    def turn(self) -> None:
        """Act on the passing of LOAD_S."""

    def of_another_router(self) -> None:
        """Handle a command of another router."""


class FakeDecode(FakeWorker, DecodeServicer):
    role = fleet_pb2.DECODE

    def __init__(
        self, number: int, access: Access, card: pb.ModelCard, shape: Shape, exchange: Exchange
    ) -> None:
        self.peers = shape.decodes
        super().__init__(number, access, card, shape)
        add_DecodeServicer_to_server(self, self.host.server)
        self._exchange = exchange
        self._streams: dict[bytes, Stream] = {}  # by attempt
        self._next_step = 0.0
        self._blocks = 0.0  # full, and not cached yet

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[wire.DecodeMessage]:
        outbox = TokensOutbox(wire.DecodeEvent)
        reader = asyncio.create_task(self._read(requests, outbox))
        try:
            async for batch in outbox:
                yield wire.DecodeMessage(events=batch)
        finally:
            reader.cancel()
            self._streams = {a: s for a, s in self._streams.items() if s.outbox is not outbox}

    async def _read(self, commands: Any, outbox: TokensOutbox[wire.DecodeEvent]) -> None:
        ids = IdsCollector()
        async for command in commands:
            match command.WhichOneof("command"):
                case "hello":
                    outbox.reads_rows = command.hello.reads_rows
                case "ids_part":
                    ids.add(command.ids_part)
                case "admit":
                    start = command.admit.start
                    self._admit(
                        outbox, command.admit, len(ids.take(start.request, start.prompt_ids))
                    )
                case "cancel":
                    self._streams.pop(command.cancel.attempt, None)
                case "resume":
                    outbox.put(wire.DecodeEvent(gone=wire.Gone(attempt=command.resume.attempt)))
                case "hold":
                    stayed = wire.Stayed(attempt=command.hold.attempt, reason="it is a fake")
                    outbox.put(wire.DecodeEvent(stayed=stayed))

    def _admit(
        self, outbox: TokensOutbox[wire.DecodeEvent], admit: wire.Admit, prompt_len: int
    ) -> None:
        start, attempt = admit.start, admit.attempt
        self._exchange.admitted[start.request] = time.monotonic()
        self.commanded(attempt)
        choice = NumberedChoice(start.request, attempt, start.epoch, 0)
        remote = bool(admit.prefill_incarnation)
        stream = Stream(outbox, choice, start.params.max_tokens, prompt_len, remote)
        admitted = wire.Admitted(attempt=attempt)
        if remote:
            admitted.ticket.id = attempt
            admitted.ticket.secret = os.urandom(32)
            admitted.ticket.data_address = "127.0.0.1:1"
            admitted.ticket.decode_incarnation = self.incarnation
            self._exchange.expect(attempt, lambda: self._received(stream))
        else:
            self._streams[attempt] = stream
        outbox.put(wire.DecodeEvent(admitted=admitted))

    def _received(self, stream: Stream) -> None:
        attempt = stream.choice.attempt
        verified = wire.Verified(attempt=attempt, tokens=stream.prompt_len - 1)
        stream.outbox.put(wire.DecodeEvent(verified=verified))
        self._streams[attempt] = stream

    def of_another_router(self) -> None:
        self._blocks += (self.shape.prompt_len - self.shape.shared_len) / BLOCK

    def turn(self) -> None:
        now = time.monotonic()
        if now < self._next_step or not self._streams:
            return
        self._next_step = max(now, self._next_step + 1 / self.shape.tokens_s)
        for attempt, stream in list(self._streams.items()):
            if stream.position + 1 < stream.num_tokens:
                _put_token(stream)
            else:
                _finish(stream)
                del self._streams[attempt]
                self._blocks += (stream.prompt_len - self.shape.shared_len) / BLOCK
        running = len(self._streams) * self.shape.routers
        self._blocks += running / BLOCK
        blocks, self._blocks = divmod(self._blocks, 1)
        self.cache(int(blocks))
        load = self.load
        load.running = running
        load.generation_tokens += running
        mean_len = self.shape.prompt_len + self.shape.answer_len // 2
        load.blocks_used = min(BLOCKS_TOTAL, running * mean_len // BLOCK)
        load.blocks_cached = min(self.shape.hashes, BLOCKS_TOTAL - load.blocks_used)
        load.blocks_free = BLOCKS_TOTAL - load.blocks_used - load.blocks_cached
        self.changed = True


def _put_token(stream: Stream) -> None:
    position, stream.position = stream.position, stream.position + 1
    if not stream.outbox.put_token(stream.choice, position, position % MARKS):
        tokens = _tokens(stream, position)
        stream.outbox.put(wire.DecodeEvent(tokens=tokens))


def _finish(stream: Stream) -> None:
    choice = stream.choice
    tokens = _tokens(stream, stream.position)
    tokens.finish = pb.LENGTH
    stream.outbox.put(wire.DecodeEvent(tokens=tokens))
    finished = pb.Finished(
        request=choice.request, attempt=choice.attempt, epoch=choice.epoch, remote=stream.remote,
        transport="tcp" if stream.remote else "", phases=pb.Phases(prefill_s=PREFILL_S),
    )  # fmt: skip
    stream.outbox.put(wire.DecodeEvent(finished=finished))


def _tokens(stream: Stream, position: int) -> pb.Tokens:
    choice = stream.choice
    return pb.Tokens(
        request=choice.request, attempt=choice.attempt, epoch=choice.epoch, position=position,
        ids=[position % MARKS],
    )  # fmt: skip


class FakePrefill(FakeWorker, PrefillServicer):
    role = fleet_pb2.PREFILL

    def __init__(
        self, number: int, access: Access, card: pb.ModelCard, shape: Shape, exchange: Exchange
    ) -> None:
        self.peers = shape.prefills
        super().__init__(number, access, card, shape)
        add_PrefillServicer_to_server(self, self.host.server)
        self._exchange = exchange
        self._new_blocks = 0
        self.load.prefill_tokens_s = PREFILL_TOKENS_S

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[wire.PrefillMessage]:
        outbox = Outbox[wire.PrefillEvent]()
        reader = asyncio.create_task(self._read(requests, outbox))
        try:
            async for batch in outbox:
                yield wire.PrefillMessage(events=batch)
        finally:
            reader.cancel()

    async def _read(self, commands: Any, outbox: Outbox[wire.PrefillEvent]) -> None:
        loop = asyncio.get_running_loop()
        async for command in commands:
            if command.HasField("start"):
                start = command.start
                self.commanded(start.attempt)
                self.of_another_router()
                accepted = wire.PrefillAccepted(attempt=start.attempt)
                outbox.put(wire.PrefillEvent(accepted=accepted))
                loop.call_later(PREFILL_S, self._done, outbox, start.attempt, start.ticket.id)

    def _done(self, outbox: Outbox[wire.PrefillEvent], attempt: bytes, ticket: bytes) -> None:
        self._exchange.deliver(ticket)
        phases = pb.Phases(prefill_s=PREFILL_S)
        done = wire.PrefillDone(attempt=attempt, transport="tcp", sent_bytes=1 << 20, phases=phases)
        outbox.put(wire.PrefillEvent(done=done))
        self.changed = True

    def of_another_router(self) -> None:
        self._new_blocks += (self.shape.prompt_len - self.shape.shared_len) // BLOCK
        self.load.prompt_tokens += self.shape.prompt_len - self.shape.shared_len

    def turn(self) -> None:
        num, self._new_blocks = self._new_blocks, 0
        self.cache(num)
        self.load.waiting = num * BLOCK // self.shape.prompt_len


def new_hashes(count: int) -> list[bytes]:
    """Hashes that no prompt has."""
    drawn = os.urandom(HASH_BYTES * count)
    return [drawn[at : at + HASH_BYTES] for at in range(0, len(drawn), HASH_BYTES)]


async def run(certificates: Path, shape: Shape, routers: list[str]) -> dict[str, float]:
    """Run the workers; returns the arrival time of each Admit."""
    card, blobs = model()
    exchange = Exchange()
    decode = trusted(certificates, Role.DECODE)
    prefill = trusted(certificates, Role.PREFILL)
    workers = [
        *(FakeDecode(n, decode, card, shape, exchange) for n in range(shape.decodes)),
        *(FakePrefill(n, prefill, card, shape, exchange) for n in range(shape.prefills)),
    ]
    for worker in workers:
        await worker.start(routers, blobs.get)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print("ready", flush=True)
    await stop.wait()
    return exchange.admitted


def main() -> None:
    certificates, text, file, *routers = sys.argv[1:]
    shape = Shape.from_json(text)
    admitted = uvloop.run(run(Path(certificates), shape, routers))
    Path(file).write_text(json.dumps(admitted))
    os._exit(0)  # hundreds of threads without data to save


if __name__ == "__main__":
    main()
