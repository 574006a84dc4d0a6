"""Moves of a request to another decode worker, as commanded by a router, and requests that stay."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fakes.decoder import FakeDecoder, fake_spec
from systems.cluster_secret import SECRET
from systems.eventually import LIMIT_S, eventually
from systems.worker_kit import Pair, SessionClient, expected, prompt, start_worker

from pdserve.engine.api import EngineConfig
from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.worker_pb2_grpc import DecodeStub
from pdserve.services.decode.servicer import DecodeRole
from pdserve.services.worker.settings import DecodeSettings

NUM = 100
PARAMS = {"max_tokens": NUM, "temperature": 1.0, "logprobs": 1, "presence_penalty": 0.5}


class Slow(FakeDecoder):
    def forward(self, batch: Any, kv: Any) -> Any:
        threading.Event().wait(0.005)
        return super().forward(batch, kv)


class Other:
    """Another decode worker and a router's session to it."""

    def __init__(self, worker: Any, role: DecodeRole) -> None:
        self.worker, self.role = worker, role
        self.client = SessionClient(DecodeStub, worker.address)

    async def admit(self, pair: Pair, ids: list[int], said: list[int]) -> tuple[bytes, Any]:
        """Admit the rest of a request of the pair, whose decode worker is to send its KV."""
        start = pb.Start(
            request="moved",
            epoch=3,
            model="tiny",
            prompt_ids=ids,
            seed=7,
            params=pb.SamplingParams(**PARAMS),
            choices=[pb.ChoiceState(generated_ids=said)],
        )
        attempt, sender = os.urandom(16), pair.decode_worker.incarnation
        admit = wire.Admit(attempt=attempt, start=start, prefill_incarnation=sender)
        self.client.send(wire.DecodeCommand(admit=admit))
        return attempt, (await self.client.wait("admitted", attempt)).ticket


@asynccontextmanager
async def another() -> AsyncIterator[Other]:
    settings = DecodeSettings(cluster_secret=(SECRET,), kv_transport="tcp")
    role = DecodeRole(settings, EngineConfig())
    worker = await start_worker(settings, role)
    other = Other(worker, role)
    try:
        yield other
    finally:
        await other.client.close()
        await worker.stop(0.5)


async def held(pair: Pair, ids: list[int]) -> tuple[bytes, list[int], Any]:
    attempt = pair.admit(ids, remote=False, params=PARAMS, seed=7)
    await eventually(lambda: len(pair.decode.tokens(attempt).get(0, [])) > 5)
    pair.decode.send(wire.DecodeCommand(hold=wire.Hold(attempt=attempt)))
    message = await pair.decode.wait("held", attempt)
    assert pair.decode.kinds(attempt)[-1] == "held"
    said = pair.decode.tokens(attempt)[0]
    assert message.tokens == len(ids) + len(said) - 1
    assert len(said) < NUM, "the request ended too soon"
    return attempt, said, message


def move(pair: Pair, attempt: bytes, to: bytes, ticket: Any) -> None:
    identity = pb.KvIdentity(digest=b"test")
    command = wire.Move(attempt=attempt, to=to, ticket=ticket, kv_identity=identity)
    pair.decode.send(wire.DecodeCommand(move=command))


def slow() -> dict[str, Any]:
    return {"model": Slow(fake_spec())}


async def snapshot(worker: Any) -> Any:
    return (
        await asyncio.wrap_future(worker.runtime.thread.post(lambda _: worker.runtime.snapshot()))
    )[0]


def test_a_request_moves_with_its_blocks(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        ids = prompt(50)
        async with another() as other:
            attempt, said, message = await held(pair, ids)
            so_far = message.so_far
            assert (so_far.cached_tokens, so_far.remote) == (0, False)
            assert so_far.phases.prefill_s > 0
            to, ticket = await other.admit(pair, ids, said)
            move(pair, attempt, to, ticket)
            moved = await pair.decode.wait("moved", attempt)
            assert (moved.to, moved.sent_bytes > 0) == (to, True)
            await other.client.wait("finished", to)
            rest = [m for k, m in other.client.events if k == "tokens"]
            assert rest[0].position == len(said)
            found = said + [token for m in rest for token in m.ids]
            assert found == expected(ids, seed=7, **PARAMS)[0]
            assert all(len(m.logprobs) == len(m.ids) for m in rest)
            assert pair.decode.kinds(attempt)[-1] == "moved", "no Finished and no token may follow"
            assert pair.decode_role.core.num_served == 0
            source, target = await snapshot(pair.decode_worker), await snapshot(other.worker)
            assert (source.moved_away, source.stayed, source.prompt_tokens) == (1, 0, 50)
            assert (target.prompt_tokens, target.recomputed_tokens) == (0, 0)
            await pair.at_rest()

    with_pair(test, engine=slow())


@pytest.mark.parametrize("how", ["stay", "refused", "session", "resumed", "cancel", "choice"])
def test_a_held_request_stays_or_ends_normally(with_pair: Callable[..., None], how: str) -> None:
    async def test(pair: Pair) -> None:
        ids = prompt(50)
        wanted = expected(ids, seed=7, **PARAMS)[0]
        attempt, said, _ = await held(pair, ids)
        client, before = pair.decode, len(said)
        if how == "stay":
            client.send(wire.DecodeCommand(stay=wire.Stay(attempt=attempt)))
        elif how == "refused":
            ticket = wire.Ticket(
                id=b"i" * 16,
                secret=b"s" * 32,
                decode_incarnation=b"b" * 16,
                data_address="127.0.0.1:9",
            )
            move(pair, attempt, b"t" * 16, ticket)
            stayed = await client.wait("stayed", attempt)
            assert "127.0.0.1:9" in stayed.reason
        elif how in ("cancel", "choice"):
            cancel = wire.CancelAttempt(attempt=attempt, choices=[0] * (how == "choice"))
            client.send(wire.DecodeCommand(cancel=cancel))
            if how == "choice":
                await client.wait("finished", attempt)
            await eventually(lambda: pair.decode_role.core.num_served == 0)
            await pair.at_rest()
            assert client.tokens(attempt)[0] == said
            return
        else:
            if how == "session":
                await client.close()
                leases = pair.decode_role.core.leases
                await eventually(lambda: leases.figures.parked == 1)
            client = SessionClient(DecodeStub, pair.decode_worker.address)
            resume = wire.Resume(attempt=attempt, epoch=4, counts=[0])
            client.send(wire.DecodeCommand(resume=resume))
        await client.wait("finished", attempt)
        found = client.tokens(attempt)[0]
        assert found == wanted
        assert len(found) > before
        load = await snapshot(pair.decode_worker)
        assert (load.moved_away, load.stayed, load.prompt_tokens) == (0, 1, 50)
        if client is not pair.decode:
            await client.close()
        await pair.at_rest()

    with_pair(test, engine=slow())


def test_a_request_that_cannot_move_is_reported_to_stay(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        two = pair.admit(prompt(20), remote=False, params={"n": 2, "max_tokens": 100})
        await pair.decode.wait("tokens", two)
        unknown = b"u" * 16
        for attempt in (two, unknown):
            pair.decode.send(wire.DecodeCommand(hold=wire.Hold(attempt=attempt)))
        assert "cannot" in (await pair.decode.wait("stayed", two)).reason
        assert "not run on this worker" in (await pair.decode.wait("stayed", unknown)).reason
        await pair.decode.wait("finished", two)
        move(pair, two, b"t" * 16, wire.Ticket(id=b"short"))
        await eventually(lambda: pair.decode.kinds(two).count("stayed") == 2)
        await pair.at_rest()

    with_pair(test, engine=slow())


def test_a_drained_worker_ends_its_sessions_after_the_last_messages(
    with_pair: Callable[..., None],
) -> None:
    async def test(pair: Pair) -> None:
        attempt = pair.admit(prompt(30), remote=False, params={"max_tokens": 30})
        await pair.decode.wait("tokens", attempt)
        await asyncio.wait_for(pair.decode_worker.drain(), LIMIT_S)
        await asyncio.wait_for(pair.decode.reader, LIMIT_S)
        assert pair.decode.kinds(attempt)[-1] == "finished"

    with_pair(test, engine=slow())
