"""Prefill and decode workers over fake engines in this process, and a router's sessions to them."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from builders.engine_kit import ask, fake_engine, run, tokens
from oracles.rings import assert_conform

from pdserve.engine.api import EngineConfig
from pdserve.engine.checkpoints import CardData
from pdserve.engine.engine import Engine
from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.worker_pb2_grpc import DecodeStub, PrefillStub
from pdserve.services.common.lifecycle import silent
from pdserve.services.common.rpc import PROTOCOL_VERSION, send_ids
from pdserve.services.common.tracing import NO_TRACER
from pdserve.services.decode.servicer import DecodeRole
from pdserve.services.prefill.servicer import PrefillRole
from pdserve.services.worker.process import AnyRole, WorkerProcess
from pdserve.services.worker.settings import DecodeSettings, PrefillSettings
from systems.cluster_secret import SECRET, open_channel
from systems.eventually import LIMIT_S, eventually
from systems.rows import SessionEvents

CARD = CardData(
    name="tiny",
    architecture="Fake",
    context_len=256,
    vocab_size=64,
    eos_ids=(),
    bos_id=None,
    adds_bos=False,
    tokenizer_json=b'{"tokenizer": "' + b"x" * 500_000 + b'"}',
    chat_template="{{ messages }}",
    weights_digest="00",
    quantization="none",
    created=1,
    weights_bytes=2,
    generation_config={"temperature": 0.5},
)


def build_with(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Engine]) -> None:
    """Make workers that are started from here load this engine."""

    def build(config: EngineConfig, progress: Callable[[str, float], None]) -> Any:
        progress("loading", 0.5)
        return make(), CARD

    monkeypatch.setattr("pdserve.services.worker.process.build_engine", build)


class SessionClient:
    """A router's end of one session: commands out, events in."""

    def __init__(self, stub_type: Any, address: str, secret: str = SECRET) -> None:
        self.events: list[tuple[str, Any]] = []  # (kind, message)
        self.batches: list[int] = []  # events of each message; a row counts as one
        self.num_rows = 0
        self._commands: asyncio.Queue[Any] = asyncio.Queue()
        self._channel = open_channel(address, secret)
        self._call = stub_type(self._channel).Session(self._requests())
        self.reader = asyncio.create_task(self._read())
        hello = wire.SessionHello(
            router_incarnation=b"router", reads_rows=True, protocol=PROTOCOL_VERSION
        )
        command = wire.DecodeCommand if stub_type is DecodeStub else wire.PrefillCommand
        self.send(command(hello=hello))

    def send(self, command: Any) -> None:
        self._commands.put_nowait(command)

    async def wait(self, kind: str, attempt: bytes) -> Any:
        """Return the first event of a kind about an attempt."""

        def find() -> list[Any]:
            return [m for k, m in self.events if k == kind and m.attempt == attempt]

        found = await eventually(find, lambda: f"{kind}; there are {self.kinds()}")
        return found[0]

    def kinds(self, attempt: bytes | None = None) -> list[str]:
        return [k for k, m in self.events if attempt is None or m.attempt == attempt]

    def tokens(self, attempt: bytes) -> dict[int, list[int]]:
        """Return ids per choice; positions must continue."""
        found: dict[int, list[int]] = {}
        for kind, message in self.events:
            if kind == "tokens" and message.attempt == attempt:
                ids = found.setdefault(message.choice, [])
                assert message.position == len(ids)
                ids.extend(message.ids)
        return found

    async def close(self) -> None:
        self.reader.cancel()
        self._call.cancel()
        await asyncio.gather(self.reader, return_exceptions=True)
        await self._channel.close()

    async def _requests(self) -> AsyncIterator[Any]:
        while True:
            yield await self._commands.get()

    async def _read(self) -> None:
        session = SessionEvents()
        async for message in self._call:
            events = [one for event in message.events for one in session.of(event)]
            self.batches.append(len(events))
            self.events += events
            self.num_rows = session.num_rows


@dataclass
class Pair:
    """A prefill and a decode worker with a session to each."""

    decode_worker: WorkerProcess
    prefill_worker: WorkerProcess
    decode_role: DecodeRole
    prefill_role: PrefillRole
    decode: SessionClient
    prefill: SessionClient

    def admit(self, ids: Sequence[int], remote: bool = True, **change: Any) -> bytes:
        """Admit a request. `shared`: missing tokens of another prompt that it waits for; 0: it
        does not.
        """
        attempt: bytes = change.pop("attempt", None) or os.urandom(16)
        shared: int = change.pop("shared", 0)
        params = {"temperature": 0.0, "max_tokens": 8} | change.pop("params", {})
        request = f"req-{attempt.hex()[:6]}"
        parts, tail = send_ids(request, ids)
        start = pb.Start(
            request=request,
            epoch=3,
            model="tiny",
            prompt_ids=tail,
            params=pb.SamplingParams(**params),
            **change,
        )
        for part in parts:
            self.decode.send(wire.DecodeCommand(ids_part=part))
        admit = wire.Admit(attempt=attempt, start=start, min_shared_tokens=shared)
        admit.prefill_incarnation = self.prefill_worker.incarnation if remote else b""
        self.decode.send(wire.DecodeCommand(admit=admit))
        return attempt

    async def hand_off(self, ids: Sequence[int], **change: Any) -> bytes:
        """Admit a request, then start the prefill of all ids except the last."""
        attempt = self.admit(ids, **change)
        admitted = await self.decode.wait("admitted", attempt)
        self.start_prefill(attempt, ids[:-1], admitted.ticket)
        return attempt

    def start_prefill(
        self, attempt: bytes, ids: Sequence[int], ticket: wire.Ticket, **change: Any
    ) -> None:
        fields = {"kv_identity": pb.KvIdentity(digest=b"test")} | change
        start = wire.PrefillStart(attempt=attempt, ids=ids, ticket=ticket, **fields)
        self.prefill.send(wire.PrefillCommand(start=start))

    async def at_rest(self) -> None:
        """Check free + cached == total on both sides, with nothing promised, reserved or held."""
        for worker in (self.decode_worker, self.prefill_worker):
            part: Any = worker.runtime
            loads: list[Any] = []

            async def rests(part: Any = part, loads: list[Any] = loads) -> bool:
                future = part.thread.post(lambda _: part.snapshot())
                load, _, _ = await asyncio.wrap_future(future)
                loads[:] = [load]
                busy = load.promised_tokens or load.running or load.waiting
                return not busy and load.blocks_free + load.blocks_cached == load.blocks_total

            await eventually(rests, loads)


async def start_worker(settings: Any, role: AnyRole, incarnation: bytes = b"") -> WorkerProcess:
    worker = WorkerProcess(settings, role, silent)
    worker.incarnation = incarnation or worker.incarnation
    await worker.start()
    await asyncio.wait_for(worker.loaded, LIMIT_S)
    return worker


@asynccontextmanager
async def worker_pair(folder: Path, transport: str = "tcp", **settings: Any) -> AsyncIterator[Pair]:
    rings = tempfile.TemporaryDirectory()
    common = {
        "cluster_secret": (SECRET,),
        "kv_transport": transport,
        "shm_dir": str(folder),
        "trace_dir": rings.name,
    } | settings
    port = common.pop("decode_metrics_port", 0)
    tracer = common.pop("tracer", NO_TRACER)
    decode_settings = DecodeSettings(**common, metrics_port=port)
    prefill_settings = PrefillSettings(**common)
    decode_role = DecodeRole(decode_settings, EngineConfig(), tracer)
    prefill_role = PrefillRole(prefill_settings, EngineConfig(), tracer)
    decode_worker = await start_worker(decode_settings, decode_role)
    prefill_worker = await start_worker(prefill_settings, prefill_role)
    pair = Pair(
        decode_worker,
        prefill_worker,
        decode_role,
        prefill_role,
        SessionClient(DecodeStub, decode_worker.address),
        SessionClient(PrefillStub, prefill_worker.address),
    )
    try:
        yield pair
    finally:
        await pair.decode.close()
        await pair.prefill.close()
        await decode_worker.stop(0.5)
        await prefill_worker.stop(0.5)
    with rings:
        assert_conform(Path(rings.name), may_be_empty=True)


def engine_maker(**options: Any) -> Callable[[], Engine]:
    return lambda: fake_engine(**({"num_blocks": 256} | options))


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(i * 7 + seed * 13 + i * i) % 60 for i in range(length)]


def expected(ids: list[int], **params: Any) -> dict[int, list[int]]:
    answer = tokens(run(fake_engine(), ask("x", ids, **params)))
    return {choice: found for (_, choice), found in answer.items()}
