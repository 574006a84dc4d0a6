"""The prefill service over real gRPC: refusals, cancel, lost sessions, a dead decode worker."""

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.decoder import FakeDecoder, fake_spec
from fakes.memory_tracer import CLIENT, MemoryTracer
from systems.eventually import LIMIT_S, eventually
from systems.worker_kit import Pair, SessionClient, build_with, engine_maker, worker_pair

from pdserve.engine.engine import Engine
from pdserve.engine.thread import EngineThread
from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.worker_pb2_grpc import PrefillStub

Test = Callable[[Pair], Awaitable[None]]
OTHER = {"kv_identity": pb.KvIdentity(digest=b"other")}


@pytest.fixture
def with_pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    def run_test(test: Test, engine: dict[str, Any] | None = None, **settings: Any) -> None:
        build_with(monkeypatch, engine_maker(**(engine or {})))

        async def main() -> None:
            async with worker_pair(tmp_path, **settings) as pair:
                await test(pair)

        asyncio.run(main())

    return run_test


def prompt(length: int) -> list[int]:
    return [(i * 7 + i * i) % 60 for i in range(length)]


def ticket(pair: Pair, **change: Any) -> wire.Ticket:
    fields: dict[str, Any] = {
        "id": os.urandom(16),
        "secret": os.urandom(32),
        "decode_incarnation": pair.decode_worker.incarnation,
        "data_address": pair.decode_worker.runtime.hello.data_address,  # type: ignore[union-attr]
    }
    return wire.Ticket(**(fields | change))


@pytest.mark.parametrize(
    ("of_ticket", "of_start", "code", "text"),
    [
        ({"id": b"short"}, {}, pb.INVALID_ARGUMENT, "ticket.id must have 16 bytes"),
        ({"secret": b""}, {}, pb.INVALID_ARGUMENT, "ticket.secret must have 32 bytes"),
        ({}, OTHER, pb.INVALID_ARGUMENT, "KV identity 74657374 at prefill, 6f74"),
        ({}, {"ids": [5000]}, pb.INVALID_ARGUMENT, "outside the vocabulary"),
        ({}, {"ids": [1] * 5000}, pb.CONTEXT_LENGTH_EXCEEDED, "5000"),
        ({"data_address": "127.0.0.1:9"}, {}, pb.UNAVAILABLE, "127.0.0.1:9"),
        ({"decode_incarnation": b"?" * 16}, {}, pb.UNAVAILABLE, "another decode process"),
        (
            {},
            {},
            pb.UNAVAILABLE,
            "decode does not know the attempt",
        ),  # a ticket that decode never issued
    ],
)
def test_a_refusal_names_its_reason(
    with_pair: Callable[..., None],
    of_ticket: dict[str, Any],
    of_start: dict[str, Any],
    code: int,
    text: str,
) -> None:
    async def test(pair: Pair) -> None:
        attempt = os.urandom(16)
        fields = {"ids": prompt(20), "ticket": ticket(pair, **of_ticket)} | of_start
        pair.start_prefill(attempt, **fields)
        failed = await pair.prefill.wait("failed", attempt)
        assert failed.failure.code == code
        assert text in failed.failure.message
        await pair.at_rest()

    with_pair(test)


def test_an_empty_prompt_part_fails_only_its_request(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        attempt = os.urandom(16)
        empty = pb.IdsPart(key=attempt.hex())  # a part without ids is refused
        pair.prefill.send(wire.PrefillCommand(ids_part=empty))
        pair.start_prefill(attempt, prompt(8), ticket(pair))
        failed = await pair.prefill.wait("failed", attempt)
        assert failed.failure.code == pb.OVERLOADED
        other = await pair.hand_off(prompt(40))
        assert await pair.prefill.wait("done", other)

    with_pair(test)


async def held_up(thread: EngineThread) -> threading.Event:
    """Block the engine thread until the event; commands posted meanwhile run in its next turn."""
    waits, release = threading.Event(), threading.Event()

    def wait(_: Engine) -> None:
        waits.set()
        release.wait(LIMIT_S)

    thread.post(wait)
    await eventually(waits.is_set)
    return release


def test_a_worker_with_a_full_queue_is_busy(with_pair: Callable[..., None]) -> None:
    tracer = MemoryTracer()

    async def test(pair: Pair) -> None:
        part: Any = pair.prefill_worker.runtime
        release = await held_up(part.thread)
        attempts = [os.urandom(16) for _ in range(4)]
        for attempt in attempts:
            pair.start_prefill(attempt, prompt(20), ticket(pair), trace_parent=CLIENT)
        # Commands are handled in order: after this one all four are in the engine thread's queue.
        pair.prefill.send(wire.PrefillCommand(cancel=wire.CancelAttempt(attempt=os.urandom(16))))
        await eventually(lambda: pair.prefill_role.core.num_stale == 1)
        release.set()
        for attempt in attempts[2:]:
            await pair.prefill.wait("busy", attempt)
        await pair.at_rest()

    with_pair(test, engine={"max_waiting": 2}, tracer=tracer)
    declined = [span for span in tracer.ended() if span.events]
    assert [span.events[0].name for span in declined] == ["busy"] * 2
    assert all(span.status.is_unset for span in declined)


def test_the_log_names_the_request(with_pair: Callable[..., None], caplog: Any) -> None:
    """This includes cancelled requests."""

    async def test(pair: Pair) -> None:
        part: Any = pair.prefill_worker.runtime
        for name in ("done", "cancelled"):
            attempt = pair.admit(prompt(100))
            admitted = await pair.decode.wait("admitted", attempt)
            release = await held_up(part.thread)
            pair.start_prefill(attempt, prompt(99), admitted.ticket, request=name)
            if name == "cancelled":
                cancel = wire.CancelAttempt(attempt=attempt)
                pair.prefill.send(wire.PrefillCommand(cancel=cancel))
                pair.decode.send(wire.DecodeCommand(cancel=cancel))
                pair.prefill.send(wire.PrefillCommand(cancel=cancel))  # stale after the first
                await eventually(lambda: pair.prefill_role.core.num_stale == 1)
                release.set()
            else:
                release.set()
                await pair.decode.wait("finished", attempt)
        await pair.at_rest()

    with caplog.at_level(logging.DEBUG, "pdserve.services.prefill.core"):
        with_pair(test)
    lines = [r for r in caplog.records if r.name == "pdserve.services.prefill.core"]
    assert [line.request for line in lines] == ["done", "cancelled"]
    assert "cancelled; " in lines[1].getMessage()


def test_a_lower_priority_value_is_computed_first(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        part: Any = pair.prefill_worker.runtime
        values: dict[bytes, int] = {}
        admitted: dict[bytes, wire.Ticket] = {}
        for value in (7, 0, -3, 2):
            attempt = pair.admit([(i + value) % 60 for i in range(80)])
            admitted[attempt] = (await pair.decode.wait("admitted", attempt)).ticket
            values[attempt] = value
        release = await held_up(part.thread)
        for attempt, value in values.items():
            ids = [(i + value) % 60 for i in range(79)]
            pair.start_prefill(attempt, ids, admitted[attempt], priority=value)
        # Commands are handled in order: after this one all are in the engine thread's queue.
        pair.prefill.send(wire.PrefillCommand(cancel=wire.CancelAttempt(attempt=os.urandom(16))))
        await eventually(lambda: pair.prefill_role.core.num_stale == 1)
        release.set()
        waited = {
            values[attempt]: (await pair.prefill.wait("done", attempt)).phases.queue_s
            for attempt in values
        }
        assert sorted(waited, key=lambda value: waited[value]) == [-3, 0, 2, 7]
        for attempt in values:
            await pair.decode.wait("finished", attempt)
        await pair.at_rest()

    with_pair(test, engine={"max_running": 1})


def test_cancel_reaches_both_workers_and_frees_their_blocks(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        attempt = pair.admit(prompt(200))
        admitted = await pair.decode.wait("admitted", attempt)
        cancel = wire.CancelAttempt(attempt=attempt)
        pair.start_prefill(attempt, prompt(199), admitted.ticket)
        pair.prefill.send(wire.PrefillCommand(cancel=cancel))
        other = pair.admit(prompt(50))
        await pair.decode.wait("admitted", other)
        pair.decode.send(wire.DecodeCommand(cancel=cancel))
        pair.decode.send(wire.DecodeCommand(cancel=wire.CancelAttempt(attempt=other)))
        await pair.at_rest()
        assert pair.prefill.kinds(attempt) in ([], ["accepted"])
        pair.prefill.send(wire.PrefillCommand(cancel=cancel))
        again = await pair.hand_off(prompt(30))
        await pair.decode.wait("finished", again)
        assert pair.prefill_role.core.num_stale == 1

    with_pair(test)


def test_a_lost_session_does_not_end_its_attempts(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        attempt = pair.admit(prompt(200))
        admitted = await pair.decode.wait("admitted", attempt)
        pair.start_prefill(attempt, prompt(199), admitted.ticket)
        await pair.prefill.wait("accepted", attempt)
        await pair.prefill.close()
        finished = await pair.decode.wait("finished", attempt)
        assert finished.remote
        await pair.at_rest()
        pair.prefill = SessionClient(PrefillStub, pair.prefill_worker.address)

    with_pair(test)


async def prompt_tokens(pair: Pair) -> int:
    """Return how many tokens the prefill worker has computed."""
    part: Any = pair.prefill_worker.runtime
    future = part.thread.post(lambda _: part.snapshot()[0].prompt_tokens)
    return int(await asyncio.wrap_future(future))


@pytest.mark.parametrize(
    ("end", "word", "text"),
    [
        ("gone", "failed", "decode does not know the attempt"),
        ("cancel", "failed", "cancelled"),
        ("done", "done", ""),
    ],
)
def test_an_ended_attempt_does_not_begin_again_and_its_end_is_resent(
    with_pair: Callable[..., None], end: str, word: str, text: str
) -> None:
    """The end is sent to a router that took the attempt over from one that has gone."""

    async def test(pair: Pair) -> None:
        attempt = pair.admit(prompt(200)) if end == "done" else os.urandom(16)
        given = ticket(pair)  # decode never issued it
        if end == "done":
            given = (await pair.decode.wait("admitted", attempt)).ticket
        pair.start_prefill(attempt, prompt(199), given)
        if end == "cancel":
            cancel = wire.CancelAttempt(attempt=attempt)
            pair.prefill.send(wire.PrefillCommand(cancel=cancel))
        core = pair.prefill_role.core
        await eventually(lambda: attempt in core._ended)
        await pair.prefill.close()
        pair.prefill = SessionClient(PrefillStub, pair.prefill_worker.address)
        await pair.at_rest()
        computed = await prompt_tokens(pair)
        for _ in range(2):
            pair.prefill.events.clear()
            pair.start_prefill(attempt, prompt(199), given)
            event = await pair.prefill.wait(word, attempt)
            assert word == "done" or text in event.failure.message
        assert pair.prefill.kinds(attempt) == [word], "the attempt was not accepted"
        assert not core.num_attempts
        await pair.at_rest()
        assert await prompt_tokens(pair) == computed
        assert end == "cancel" or computed

    with_pair(test)


def test_a_stopped_decode_worker_is_noticed(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        first = await pair.hand_off(prompt(20))
        await pair.prefill.wait("done", first)
        attempt = pair.admit(prompt(50))
        admitted = await pair.decode.wait("admitted", attempt)
        part: Any = pair.prefill_worker.runtime
        await pair.decode_worker.stop(0.1)
        # No new connection is tried until the old one's end is noticed.
        await eventually(lambda: not any(link.open for link in part.sender.links))
        pair.start_prefill(attempt, prompt(49), admitted.ticket)
        failed = await pair.prefill.wait("failed", attempt)
        assert failed.failure.code == pb.UNAVAILABLE
        load = (await asyncio.wrap_future(part.thread.post(lambda _: part.snapshot())))[0]
        assert load.blocks_free + load.blocks_cached == load.blocks_total
        assert load.transports[0].refused > 0

    with_pair(test)


def test_drain_waits_for_its_attempts(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        attempt = pair.admit(prompt(200))
        admitted = await pair.decode.wait("admitted", attempt)
        pair.start_prefill(attempt, prompt(199), admitted.ticket)
        await pair.prefill.wait("accepted", attempt)
        drained = asyncio.create_task(pair.prefill_worker.drain())
        await asyncio.sleep(0)
        late = os.urandom(16)
        pair.start_prefill(late, prompt(20), ticket(pair))
        failed = await pair.prefill.wait("failed", late)
        assert "not accept new work" in failed.failure.message
        await asyncio.wait_for(drained, LIMIT_S)
        await pair.prefill.wait("done", attempt)
        await pair.decode.wait("finished", attempt)

    with_pair(test)


class Shut(FakeDecoder):
    """A model whose prefill_only requests wait for `opened`."""

    opened = threading.Event()
    entered = threading.Event()

    def forward(self, batch: Any, kv: Any) -> Any:
        self.entered.set()
        assert self.opened.wait(LIMIT_S)
        return super().forward(batch, kv)


def test_drain_returns_requests_that_have_not_begun(with_pair: Callable[..., None]) -> None:
    """The first prompt fills the batch; the second one waits in the engine's queue."""
    Shut.opened.clear()
    Shut.entered.clear()
    tracer = MemoryTracer()

    async def test(pair: Pair) -> None:
        first, second = pair.admit(prompt(200)), pair.admit(prompt(100))
        for number, (attempt, length) in enumerate(((first, 199), (second, 99)), 1):
            admitted = await pair.decode.wait("admitted", attempt)
            pair.start_prefill(attempt, prompt(length), admitted.ticket, trace_parent=CLIENT)
            core = pair.prefill_role.core
            await eventually(lambda core=core, number=number: core.num_attempts == number)
            await eventually(Shut.entered.is_set)
        drained = asyncio.create_task(pair.prefill_worker.drain())
        await asyncio.sleep(0)
        Shut.opened.set()
        failed = await pair.prefill.wait("failed", second)
        assert failed.handed_back
        assert "handed back" in failed.failure.message
        await pair.prefill.wait("done", first)
        await asyncio.wait_for(drained, LIMIT_S)
        await asyncio.wait_for(pair.prefill.reader, LIMIT_S)  # its session has ended in order
        pair.decode.send(wire.DecodeCommand(cancel=wire.CancelAttempt(attempt=second)))
        await pair.decode.wait("finished", first)

    with_pair(test, engine={"model": Shut(fake_spec()), "max_running": 1}, tracer=tracer)
    spans = tracer.ended()
    assert [span.status.is_unset for span in spans if span.name == "prefill"] == [True, True]
    assert [e.name for span in spans for e in span.events] == ["handed back"]
