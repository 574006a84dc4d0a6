"""Workers without an engine: real gRPC and the real Membership, tokens from a formula."""

import asyncio
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import grpc
from systems.cluster_secret import ACCESS
from systems.eventually import eventually

from pdserve.engine.kv import KvSpec, encode_spec
from pdserve.protos import common_pb2 as pb
from pdserve.protos import fleet_pb2
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.common_pb2_grpc import BlobsServicer, add_BlobsServicer_to_server
from pdserve.protos.worker_pb2_grpc import (
    DecodeServicer,
    PrefillServicer,
    add_DecodeServicer_to_server,
    add_PrefillServicer_to_server,
)
from pdserve.services.common.rpc import (
    PROTOCOL_VERSION,
    IdsCollector,
    NumberedChoice,
    Outbox,
    TokensOutbox,
)
from pdserve.services.common.server import GrpcServer
from pdserve.services.worker.membership import Membership

TOKENIZER = b'{"tokenizer": "of the tests"}' * 20_000  # more than one chunk


def token(prompt: list[int], seed: int, choice: int, position: int) -> int:
    """Return the token that any worker of the tests generates: a function of the request alone."""
    return (sum(prompt) * 31 + seed * 17 + choice * 7 + position * 13) % 50_000


def card(model: str = "tiny", identity: bytes = b"identity") -> pb.ModelCard:
    return pb.ModelCard(
        name=model,
        context_len=1_000_000,
        kv_identity=pb.KvIdentity(digest=identity),
        tokenizer_digest=hashlib.sha256(TOKENIZER).hexdigest(),
        kv_spec=encode_spec(KvSpec(16, ())),
    )


class FakeWorker(ABC):
    """Common parts of both roles. `events` counts received messages; `wait(name)` waits for a
    first one.
    """

    role: fleet_pb2.Role

    def __init__(
        self, model: str = "tiny", identity: bytes = b"identity", protocol: int = PROTOCOL_VERSION
    ) -> None:
        self.protocol = protocol
        self.liveness = 0, False  # the engine's counter, and whether it has work
        self.incarnation = os.urandom(16)
        self.card = card(model, identity)
        self.outboxes: list[Outbox[Any]] = []
        self.received: list[Any] = []
        self.cancelled: list[tuple[bytes, tuple[int, ...]]] = []
        self.tasks: dict[bytes, asyncio.Task[None]] = {}
        self.membership: Membership | None = None
        self.address = ""

    async def start(self, router: str, port: int = 0) -> None:
        self.host = GrpcServer(ACCESS)
        self.register()
        add_BlobsServicer_to_server(FakeBlobs(), self.host.server)
        self.address = f"127.0.0.1:{self.host.listen(f'127.0.0.1:{port}')}"
        await self.host.start()
        hello = fleet_pb2.WorkerHello(
            role=self.role,
            incarnation=self.incarnation,
            address=self.address,
            card=self.card,
            transports=["tcp"],
            wire_version=1,
            protocol=self.protocol,
        )
        self.membership = Membership(hello, [router], ACCESS, lambda: self.liveness)
        self.membership.start()

    @abstractmethod
    def new_outbox(self) -> Outbox[Any]:
        """Return the queue of messages for a router."""

    @abstractmethod
    def register(self) -> None:
        """Add the role's servicer."""

    async def note(self, command: Any) -> None:
        self.received.append(command)

    async def until(self, condition: Callable[[], bool]) -> None:
        await eventually(condition, self.received)

    def of(self, kind: str) -> list[Any]:
        return [getattr(c, kind) for c in self.received if c.WhichOneof("command") == kind]

    async def cancel(self, cancel: wire.CancelAttempt) -> None:
        self.cancelled.append((cancel.attempt, tuple(cancel.choices)))
        if not cancel.choices and cancel.attempt in self.tasks:
            self.tasks.pop(cancel.attempt).cancel()

    def put(self, event: Any) -> None:
        self.outboxes[-1].put(event)

    async def kill(self) -> None:
        """Die as by SIGKILL: sockets close without a message."""
        for task in self.tasks.values():
            task.cancel()
        await self.host.stop(0)
        if self.membership is not None:
            await asyncio.to_thread(self.membership.close)
            self.membership = None

    async def session(self, commands: Any) -> AsyncIterator[Any]:
        outbox = self.new_outbox()
        self.outboxes.append(outbox)
        reader = asyncio.create_task(self._read(commands))
        try:
            async for batch in outbox:
                yield batch
        finally:
            reader.cancel()
            with suppress(asyncio.CancelledError, grpc.aio.BaseError):  # `kill` stops the server
                await reader

    async def _read(self, commands: Any) -> None:
        self.collector = IdsCollector()
        async for command in commands:
            kind = command.WhichOneof("command")
            if kind == "ids_part":
                self.collector.add(command.ids_part)
            elif kind == "hello" and isinstance(self.outboxes[-1], TokensOutbox):
                self.outboxes[-1].reads_rows = command.hello.reads_rows
            elif kind == "cancel":
                await self.cancel(command.cancel)
            elif kind == "resume":
                self.resume(command.resume)
            elif kind in ("hold", "move", "stay"):
                getattr(self, kind)(getattr(command, kind))
            elif kind in ("admit", "start"):
                message = getattr(command, kind)
                self.tasks[message.attempt] = asyncio.create_task(self.run(message))
            await self.note(command)

    def resume(self, resume: wire.Resume) -> None:
        """Answer one Resume."""
        self.put(wire.DecodeEvent(gone=wire.Gone(attempt=resume.attempt)))

    @abstractmethod
    async def run(self, message: Any) -> None:
        """Answer one Admit or PrefillStart."""


class FakeBlobs(BlobsServicer):
    async def GetBlob(self, request: Any, context: Any) -> AsyncIterator[pb.BlobChunk]:
        for at in range(0, len(TOKENIZER), 100_000):
            yield pb.BlobChunk(data=TOKENIZER[at : at + 100_000])


class FakeDecode(FakeWorker, DecodeServicer):
    """Generates max_tokens per choice, one event per token; resends all of them on a Resume."""

    role = fleet_pb2.DECODE

    def __init__(self, *args: Any, hold_at: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.busy = 0  # answer Busy this many times
        self.cached_tokens = 0  # reported in Finished
        self.hold_at = hold_at  # stop before this position until released
        self.released = asyncio.Event()
        self.arrived: dict[bytes, asyncio.Event] = {}  # by attempt: KV is complete
        self.prompts: dict[bytes, list[int]] = {}
        self.said: dict[bytes, list[wire.DecodeEvent]] = {}  # tokens and Finished, by attempt
        self.tickets: dict[bytes, tuple[wire.Ticket, bytes]] = {}  # and the prefill worker
        self.mute = False  # do not answer Resume
        self.answering = asyncio.Event()  # until it is set, no Admit is answered
        self.answering.set()
        self.admits: dict[bytes, wire.Admit] = {}
        self.peers: list[FakeDecode] = []  # possible targets of a move
        self.keep = False  # answer Hold with Stayed
        self.silent = False  # do not answer Hold
        self.break_moves = ""  # why no hand-off completes

    def resume(self, resume: wire.Resume) -> None:
        attempt = resume.attempt
        if self.mute:
            return
        if attempt not in self.said:
            super().resume(resume)
            return
        resumed = wire.Resumed(attempt=attempt, epoch=resume.epoch)
        if attempt in self.arrived and not self.arrived[attempt].is_set():
            ticket, resumed.prefill_incarnation = self.tickets[attempt]
            resumed.ticket.CopyFrom(ticket)
        self.put(wire.DecodeEvent(resumed=resumed))
        for event in self.said[attempt]:
            again = wire.DecodeEvent()
            again.CopyFrom(event)
            self.put(again)

    def hold(self, hold: wire.Hold) -> None:
        attempt = hold.attempt
        if self.silent:
            return
        if self.keep or attempt not in self.tasks:
            self.put(
                wire.DecodeEvent(stayed=wire.Stayed(attempt=attempt, reason="scripted refusal"))
            )
            return
        self.tasks.pop(attempt).cancel()
        start = self.admits[attempt].start
        given = len(start.choices[0].generated_ids) if start.choices else 0
        said = given + sum(len(e.tokens.ids) for e in self.said[attempt])
        so_far = pb.Finished(cached_tokens=self.cached_tokens, transport="first")
        tokens = len(self.prompts[attempt]) + said - 1
        held = wire.Held(attempt=attempt, tokens=tokens, so_far=so_far)
        self.put(wire.DecodeEvent(held=held))

    def move(self, move: wire.Move) -> None:
        if self.break_moves:
            stayed = wire.Stayed(attempt=move.attempt, reason=self.break_moves)
            self.put(wire.DecodeEvent(stayed=stayed))
            self.go_on(move.attempt)
            return
        (target,) = (p for p in self.peers if p.address == move.ticket.data_address)
        target.arrived[move.to].set()
        moved = wire.Moved(attempt=move.attempt, to=move.to, sent_bytes=1000)
        self.put(wire.DecodeEvent(moved=moved))

    def stay(self, stay: wire.Stay) -> None:
        if stay.attempt not in self.tasks:
            self.go_on(stay.attempt)

    def go_on(self, attempt: bytes) -> None:
        self.tasks[attempt] = asyncio.create_task(self.generate(self.admits[attempt]))

    def say(self, attempt: bytes, event: wire.DecodeEvent) -> None:
        kept = wire.DecodeEvent()
        kept.CopyFrom(event)
        self.said[attempt].append(kept)
        tokens = event.tokens
        if len(tokens.ids) == 1 and not tokens.logprobs and not tokens.finish:
            named = tokens.request, tokens.attempt, tokens.epoch, tokens.choice
            row = NumberedChoice(*named), tokens.position, tokens.ids[0]
            if self.outboxes[-1].put_token(*row):
                return
        self.put(event)

    def new_outbox(self) -> Outbox[Any]:
        return TokensOutbox(wire.DecodeEvent)

    def register(self) -> None:
        add_DecodeServicer_to_server(self, self.host.server)

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for batch in self.session(request_iterator):
            yield wire.DecodeMessage(events=batch)

    async def run(self, message: wire.Admit) -> None:
        start, attempt = message.start, message.attempt
        prompt = self.collector.take(start.request, start.prompt_ids)
        self.prompts[attempt] = prompt
        self.admits[attempt] = message
        await self.answering.wait()
        if self.busy:
            self.busy -= 1
            self.put(wire.DecodeEvent(busy=wire.Busy(attempt=attempt)))
            return
        admitted = wire.Admitted(attempt=attempt)
        if message.prefill_incarnation:
            self.arrived[attempt] = asyncio.Event()
            admitted.ticket.id = attempt
            admitted.ticket.data_address = self.address
            self.tickets[attempt] = (admitted.ticket, message.prefill_incarnation)
        self.said[attempt] = []
        self.put(wire.DecodeEvent(admitted=admitted))
        if message.prefill_incarnation:
            await self.arrived[attempt].wait()
        await self.generate(message)

    async def pool(self, message: wire.Admit) -> None:
        """Send an embedding: the first id of the prompt and its length."""
        start, attempt = message.start, message.attempt
        named: dict[str, Any] = {"request": start.request, "attempt": attempt, "epoch": start.epoch}
        if self.hold_at == 0:
            await self.released.wait()
        prompt = self.prompts[attempt]
        embedding = pb.Embedding(values=[prompt[0], len(prompt)], **named)
        self.say(attempt, wire.DecodeEvent(embedding=embedding))
        if self.hold_at == 1:
            await self.released.wait()
        self.say(attempt, wire.DecodeEvent(finished=pb.Finished(**named)))
        self.tasks.pop(attempt, None)

    async def generate(self, message: wire.Admit) -> None:
        start, attempt = message.start, message.attempt
        if start.pool:
            await self.pool(message)
            return
        prompt = self.prompts[attempt]
        choices = list(start.choices) or [pb.ChoiceState() for _ in range(max(1, start.params.n))]
        total = start.params.max_tokens
        first = min(len(c.generated_ids) for c in choices)
        first += len([e for e in self.said[attempt] if not e.tokens.choice])
        for position in range(first, total):
            if self.hold_at == position:
                await self.released.wait()
            for index, choice in enumerate(choices):
                if choice.finish or position < len(choice.generated_ids):
                    continue
                tokens = pb.Tokens(
                    request=start.request,
                    attempt=attempt,
                    epoch=start.epoch,
                    choice=index,
                    position=position,
                    ids=[token(prompt, start.seed, index, position)],
                    finish=pb.LENGTH if position == total - 1 else pb.FINISH_REASON_UNSPECIFIED,
                )
                self.say(attempt, wire.DecodeEvent(tokens=tokens))
        remote = bool(message.prefill_incarnation)
        finished = pb.Finished(
            request=start.request,
            attempt=attempt,
            remote=remote,
            cached_tokens=self.cached_tokens,
        )
        self.say(attempt, wire.DecodeEvent(finished=finished))
        self.tasks.pop(attempt, None)


class FakePrefill(FakeWorker, PrefillServicer):
    """Tells the decode worker of the ticket that the KV is there."""

    role = fleet_pb2.PREFILL

    def __init__(self, decodes: list[FakeDecode], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.decodes = decodes
        self.fail = 0  # fail this many prompts
        self.hang = False  # accept, then do nothing
        self.num_hung = 0  # prompts that it has accepted while hanging
        self.ids: dict[bytes, list[int]] = {}

    def new_outbox(self) -> Outbox[Any]:
        return Outbox()

    def register(self) -> None:
        add_PrefillServicer_to_server(self, self.host.server)

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for batch in self.session(request_iterator):
            yield wire.PrefillMessage(events=batch)

    async def run(self, message: wire.PrefillStart) -> None:
        attempt = message.attempt
        self.ids[attempt] = self.collector.take(attempt.hex(), message.ids)
        self.put(wire.PrefillEvent(accepted=wire.PrefillAccepted(attempt=attempt)))
        if self.fail:
            self.fail -= 1
            failure = pb.Failure(code=pb.INTERNAL, message="scripted failure")
            self.put(wire.PrefillEvent(failed=wire.PrefillFailed(attempt=attempt, failure=failure)))
            return
        if self.hang:
            self.num_hung += 1
            return
        for decode in self.decodes:
            if decode.address == message.ticket.data_address:
                decode.arrived[attempt].set()
        self.put(wire.PrefillEvent(done=wire.PrefillDone(attempt=attempt, transport="tcp")))
