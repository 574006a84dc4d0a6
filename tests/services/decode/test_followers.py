"""Followers: requests that wait for the KV of another request's prompt and share it."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fakes.decoder import FakeDecoder, fake_spec
from fakes.memory_tracer import CLIENT, MemoryTracer
from systems.eventually import eventually
from systems.worker_kit import Pair, SessionClient, expected, prompt

from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.worker_pb2_grpc import DecodeStub
from pdserve.services.common.tracing import NO_TRACER, Tracer
from pdserve.services.decode.single_flight import PromisedPrefixes

IDS = prompt(200)
BLOCK, CHUNK = 4, 16
EPOCH = 3  # of every Admit


class Gated(FakeDecoder):
    """A model that computes chunks from the third on only once its gate is open, and rows at any
    time.

    It does not stop before KV of its prompt has arrived at decode: the thread that computes also
    receives the permission to send.
    """

    def __init__(self) -> None:
        super().__init__(fake_spec())
        self.gate = threading.Event()
        self.arrived = threading.Event()
        self.held = threading.Event()
        self.chunks = 0

    def forward(self, batch: Any, kv: Any) -> Any:
        chunk = (
            len(batch.token_ids) > len(batch.kv_lens) and int(batch.positions.max()) >= 2 * CHUNK
        )
        self.chunks += chunk
        if chunk and not self.gate.is_set() and self.arrived.wait(0.1 if self.chunks < 4 else 2.0):
            self.held.set()
            self.gate.wait(20)
        return super().forward(batch, kv)


class Bench:
    """The model of both workers: a prefill stops in the middle until the gate is open."""

    def __init__(self) -> None:
        self.model = Gated()
        self.gate = self.model.gate

    async def held(self) -> None:
        await eventually(self.model.held.is_set)

    async def verified(self, pair: Pair, attempt: bytes) -> None:
        """Wait until prefill is held and decode has reported the arrived blocks."""
        await self.held()
        await pair.decode.wait("verified", attempt)


async def load(pair: Pair, prefill: bool = False) -> Any:
    part: Any = (pair.prefill_worker if prefill else pair.decode_worker).runtime
    return (await asyncio.wrap_future(part.thread.post(lambda _: part.snapshot())))[0]


async def lead(pair: Pair, ids: Sequence[int] = IDS, **change: Any) -> bytes:
    return await pair.hand_off(ids, shared=BLOCK, **change)


async def follow(pair: Pair, ids: Sequence[int] = IDS, **change: Any) -> bytes:
    attempt = pair.admit(ids, **({"shared": BLOCK} | change))
    admitted = await pair.decode.wait("admitted", attempt)
    assert admitted.follows
    assert not admitted.HasField("ticket")
    return attempt


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    made, arrived = Bench(), PromisedPrefixes.arrived

    def note(prefixes: PromisedPrefixes, key: str, blocks: int, in_engine: bool = False) -> None:
        made.model.arrived.set()
        arrived(prefixes, key, blocks, in_engine)

    monkeypatch.setattr(PromisedPrefixes, "arrived", note)
    return made


@pytest.fixture
def with_bench(with_pair: Callable[..., None], bench: Bench) -> Callable[..., None]:
    def run(test: Any, tracer: Tracer = NO_TRACER, **engine: Any) -> None:
        try:
            with_pair(test, engine={"model": bench.model} | engine, tracer=tracer)
        finally:
            bench.gate.set()

    return run


@pytest.mark.parametrize("length", [200, 199, 203])
def test_followers_share_the_kv_of_one_leader(
    with_bench: Callable[..., None], bench: Bench, length: int
) -> None:
    ids = prompt(length)

    async def test(pair: Pair) -> None:
        first = await lead(pair, ids)
        await bench.held()
        others = [await follow(pair, ids, remote=number % 2 == 0) for number in range(7)]
        report = await load(pair)
        assert (report.following, report.attached) == (7, 0)
        assert report.waiting >= 7
        await bench.verified(pair, first)
        assert report.promised_tokens == 0, (
            "the leader's blocks are reserved, no follower's are promised"
        )
        assert "tokens" not in pair.decode.kinds()
        bench.gate.set()
        for attempt in (first, *others):
            finished = await pair.decode.wait("finished", attempt)
            assert pair.decode.tokens(attempt) == expected(ids)
            assert finished.remote == (attempt == first)
            if attempt != first:
                assert finished.cached_tokens >= length - 1 - length % BLOCK
                kinds = pair.decode.kinds(attempt)
                assert kinds.index("attached") < kinds.index("tokens")
        report = await load(pair)
        assert (report.following, report.attached, report.placed_again) == (0, 7, 0)
        assert (await load(pair, prefill=True)).prompt_tokens == length - 1
        # Each computes its own last token, and the part of the prompt that does not fill a block.
        assert report.prompt_tokens == 1 + 7 * max(1, length % BLOCK)
        (transport,) = report.transports
        assert transport.bytes == -(-(length - 1) // BLOCK) * 128
        await pair.at_rest()

    with_bench(test)


def test_a_follower_with_another_tail_waits_for_the_common_blocks_only(
    with_bench: Callable[..., None], bench: Bench
) -> None:
    tracer = MemoryTracer()

    async def test(pair: Pair) -> None:
        first = await lead(pair)
        await bench.verified(pair, first)
        short = [*IDS[:150], 1, 2]
        other = await follow(pair, short, shared=BLOCK)
        long, other_long = ([*IDS[:120], *prompt(60, seed)] for seed in (3, 4))
        local = await follow(pair, other_long, shared=16, remote=False)
        remote = await follow(pair, long, shared=16)
        twin = await follow(pair, long, shared=16, trace_parent=CLIENT)
        assert pair.decode.kinds(other) == ["admitted"]
        bench.gate.set()
        for attempt, ids in ((other, short), (local, other_long)):
            await pair.decode.wait("finished", attempt)
            assert pair.decode.tokens(attempt) == expected(ids)
        for attempt in (remote, twin):  # whose twin was to bring the remaining blocks
            again = await pair.decode.wait("place_again", attempt)
            assert again.tokens >= 120
            assert pair.decode.kinds(attempt) == ["admitted", "place_again"]
        await pair.decode.wait("finished", first)
        assert (await load(pair)).placed_again == 2
        await pair.at_rest()

    with_bench(test, tracer)
    span = tracer.spans()["decode"]
    assert [event.name for event in span.events] == ["place again"]
    assert span.status.is_unset


def test_requests_that_do_not_follow(with_bench: Callable[..., None], bench: Bench) -> None:
    async def test(pair: Pair) -> None:
        first = await lead(pair)
        await bench.held()
        requests = [
            pair.admit(IDS, shared=0),
            pair.admit(IDS, shared=BLOCK, cache_salt=b"another tenant"),
            pair.admit([*IDS[:40], *prompt(160, 3)], shared=BLOCK),  # less than half
            pair.admit(IDS, shared=BLOCK, priority=-1),  # the first one may be passed
            pair.admit(IDS, shared=300),  # less than is worth waiting for
            pair.admit(prompt(60, 5), shared=BLOCK),
            pair.admit(IDS, shared=BLOCK, params={"prompt_logprobs": 1}),
        ]
        for attempt in requests:
            assert not (await pair.decode.wait("admitted", attempt)).follows
        for attempt in requests[:-1]:
            pair.decode.send(wire.DecodeCommand(cancel=wire.CancelAttempt(attempt=attempt)))
        bench.gate.set()
        await pair.decode.wait("finished", first)
        await pair.decode.wait("finished", requests[-1])
        assert (await load(pair)).attached == 0
        await pair.at_rest()

    with_bench(test, num_blocks=512)


def test_a_prefill_in_decode_also_leads(with_bench: Callable[..., None], bench: Bench) -> None:
    async def test(pair: Pair) -> None:
        first = pair.admit(IDS, remote=False, shared=BLOCK)
        await bench.held()
        # Decode's engine is at its third chunk: new requests are admitted behind it.
        others = [pair.admit(IDS, remote=remote, shared=BLOCK) for remote in (True, False, True)]
        await eventually(lambda: pair.decode_role.core.num_served == 4)
        bench.gate.set()
        for attempt in (first, *others):
            await pair.decode.wait("finished", attempt)
            assert pair.decode.tokens(attempt) == expected(IDS)
        admitted = [await pair.decode.wait("admitted", attempt) for attempt in others]
        assert all(answer.follows for answer in admitted)
        report = await load(pair)
        assert report.prompt_tokens == 200 + 3
        assert report.attached == 3
        await pair.at_rest()

    with_bench(test)


@pytest.mark.parametrize("how", ["cancelled", "deadline", "lost"])
def test_followers_of_a_lost_leader_are_placed_again(
    with_bench: Callable[..., None], bench: Bench, how: str
) -> None:
    """Every follower gets the message after the leader, in order; the first to come back leads."""

    async def test(pair: Pair) -> None:
        left = {"remaining_ms": 1500} if how == "deadline" else {}
        first = await lead(pair, **left)
        await bench.verified(pair, first)
        others = [await follow(pair) for _ in range(3)]
        cancel = wire.CancelAttempt(attempt=first)
        if how == "cancelled":
            pair.decode.send(wire.DecodeCommand(cancel=cancel))
        elif how == "lost":
            part: Any = pair.prefill_worker.runtime
            for link in part.sender.links:
                link.end("killed")
        for attempt in others:
            again = await pair.decode.wait("place_again", attempt)
            assert CHUNK <= again.tokens < 199
            assert pair.decode.kinds(attempt) == ["admitted", "place_again"]
        ends = [m.attempt for k, m in pair.decode.events if k in ("place_again", "handoff_lost")]
        assert ends == ([first] if how == "lost" else []) + others
        report = await load(pair)
        assert (report.following, report.placed_again) == (0, 3)
        pair.prefill.send(wire.PrefillCommand(cancel=cancel))
        bench.gate.set()
        promoted = await lead(pair)
        rest = [pair.admit(IDS, shared=BLOCK) for _ in range(2)]
        for attempt in (promoted, *rest):
            await pair.decode.wait("finished", attempt)
            assert pair.decode.tokens(attempt) == expected(IDS)
        assert (await load(pair)).prompt_tokens == 3
        # The prefill worker has the lost leader's chunks in its cache.
        assert (await load(pair, prefill=True)).prompt_tokens <= 199 + CHUNK
        await pair.at_rest()

    with_bench(test)


def test_followers_end_independently(with_bench: Callable[..., None], bench: Bench) -> None:
    async def test(pair: Pair) -> None:
        first = await lead(pair)
        await bench.verified(pair, first)
        gone = await follow(pair)
        late = await follow(pair, remaining_ms=200)
        both = {"n": 2, "temperature": 1.0}
        half = await follow(pair, params=both, seed=7)
        pair.decode.send(wire.DecodeCommand(cancel=wire.CancelAttempt(attempt=gone)))
        choice = wire.CancelAttempt(attempt=half, choices=[0])
        pair.decode.send(wire.DecodeCommand(cancel=choice))
        failed = await pair.decode.wait("failed", late)
        assert failed.failure.code == pb.DEADLINE_EXCEEDED
        await eventually(lambda: pair.decode_role.core.num_served == 2)
        assert (await load(pair)).following == 1
        bench.gate.set()
        await pair.decode.wait("finished", first)
        await pair.decode.wait("finished", half)
        found = pair.decode.tokens(half)
        assert (found[0], found[1]) == ([], expected(IDS, seed=7, **both)[1])
        assert pair.decode.kinds(gone) == ["admitted"]
        report = await load(pair)
        assert (report.attached, report.placed_again) == (1, 0)
        await pair.at_rest()

    with_bench(test)


@pytest.mark.parametrize("begun", [True, False])
def test_a_queue_timeout_ends_only_followers_of_a_leader_that_has_not_begun(
    with_bench: Callable[..., None], bench: Bench, begun: bool
) -> None:
    async def test(pair: Pair) -> None:
        if begun:
            first = await lead(pair)
            await bench.verified(pair, first)
        else:
            first = pair.admit(IDS, shared=BLOCK)
            admitted = await pair.decode.wait("admitted", first)
        other = await follow(pair, queue_remaining_ms=200)
        if begun:
            await asyncio.sleep(0.4)
            bench.gate.set()
            await pair.decode.wait("finished", other)
        else:
            failed = await pair.decode.wait("failed", other)
            assert failed.failure.code == pb.QUEUE_TIMEOUT
            bench.gate.set()
            pair.start_prefill(first, IDS[:-1], admitted.ticket)
        await pair.decode.wait("finished", first)
        await pair.at_rest()

    with_bench(test)


@pytest.mark.parametrize("adopted", ["before", "after", "never"])
def test_a_parked_follower_also_waits_for_its_router(
    with_bench: Callable[..., None], bench: Bench, adopted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`adopted`: before its KV has arrived, or after that. Nothing is computed twice."""
    ids = IDS[:-1]  # its last block is not full: all that is shared comes with the hand-off
    if adopted == "never":
        monkeypatch.setattr("pdserve.services.decode.lease_machine.PARK_S", 0.3)

    async def test(pair: Pair) -> None:
        first = await lead(pair, ids)
        await bench.verified(pair, first)
        other = await follow(pair, ids)
        figures = pair.decode_role.core.leases.figures
        await pair.decode.close()
        await eventually(lambda: figures.parked == 2 or adopted == "never")
        client = SessionClient(DecodeStub, pair.decode_worker.address)
        if adopted == "never":
            await eventually(lambda: pair.decode_role.core.num_served == 0)
            bench.gate.set()
            assert (await load(pair)).following == 0
        else:
            if adopted == "after":
                bench.gate.set()
                await pair.prefill.wait("done", first)
                part: Any = pair.decode_worker.runtime
                await eventually(lambda: part.single_flight.figures.attached == 1)
            for attempt in (first, other):
                resume = wire.Resume(attempt=attempt, epoch=EPOCH + 1)
                client.send(wire.DecodeCommand(resume=resume))
            resumed = await client.wait("resumed", other)
            assert resumed.follows == (adopted == "before")
            assert not resumed.HasField("ticket")
            bench.gate.set()
            for attempt in (first, other):
                await client.wait("finished", attempt)
                assert client.tokens(attempt) == expected(ids)
            assert ("attached" in client.kinds(other)) == (adopted == "before")
            report = await load(pair)
            assert (report.attached, report.placed_again) == (1, 0)
            assert report.prompt_tokens <= 1 + BLOCK
        await client.close()
        await pair.at_rest()

    with_bench(test)


def test_two_routers_share_one_flight(with_bench: Callable[..., None], bench: Bench) -> None:
    async def test(pair: Pair) -> None:
        first = await lead(pair)
        await bench.held()
        mine, pair.decode = pair.decode, SessionClient(DecodeStub, pair.decode_worker.address)
        other = await follow(pair)
        bench.gate.set()
        await mine.wait("finished", first)
        await pair.decode.wait("finished", other)
        assert pair.decode.tokens(other) == mine.tokens(first) == expected(IDS)
        await mine.close()
        await pair.at_rest()

    with_bench(test)


def test_the_number_of_followers_is_bounded(with_bench: Callable[..., None], bench: Bench) -> None:
    async def test(pair: Pair) -> None:
        first = await lead(pair)
        await bench.held()
        others = [await follow(pair) for _ in range(3)]
        busy = pair.admit(IDS, shared=BLOCK)
        await pair.decode.wait("busy", busy)
        bench.gate.set()
        for attempt in (first, *others):
            await pair.decode.wait("finished", attempt)
        await pair.at_rest()

    with_bench(test, max_waiting=3)


def test_no_request_follows_on_a_worker_without_a_prefix_cache(
    with_pair: Callable[..., None],
) -> None:
    async def test(pair: Pair) -> None:
        attempts = [await lead(pair) for _ in range(2)]
        for attempt in attempts:
            await pair.decode.wait("finished", attempt)
        assert (await load(pair)).attached == 0
        await pair.at_rest()

    with_pair(test, engine={"prefix_cache": False})
