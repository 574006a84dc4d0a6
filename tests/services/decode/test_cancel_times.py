"""A cancelled request frees decode's blocks within one step and prefill's within one chunk.

Counted in engine steps from the moment at which the worker receives the cancel, so that a busy
machine changes nothing; no timer frees anything here.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes.decoder import FakeDecoder, fake_spec
from systems.eventually import eventually
from systems.handoff_pair import claims_of
from systems.no_timeouts import no_timeouts
from systems.worker_kit import Pair, SessionClient, prompt

from pdserve.engine.api import Request, SamplingParams
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.worker_pb2_grpc import DecodeStub

STEP_S = 0.1  # of a chunk too: 16 tokens
LONG = 200  # tokens: 13 chunks
HOG = "hog"  # holds blocks so that others lack them


@pytest.fixture(autouse=True)
def _no_timer() -> Iterator[None]:
    with no_timeouts():
        yield


class Slow(FakeDecoder):
    """Counts `forwards` by thread: each worker's engine runs in a separate one."""

    def __init__(self) -> None:
        super().__init__(fake_spec())
        self.forwards: Counter[int] = Counter()

    def forward(self, batch: Any, kv: Any) -> Any:
        self.forwards[threading.get_ident()] += 1
        threading.Event().wait(STEP_S)
        return super().forward(batch, kv)


async def on_engine(worker: Any, what: Callable[[Any], Any]) -> Any:
    """Return `what` of the worker's engine, between two steps."""
    return await asyncio.wrap_future(worker.runtime.thread.post(what))


class Freed:
    """Counts the steps of a worker's engine from when its core receives a cancel until nothing
    remains, checked between steps.
    """

    def __init__(self, model: Slow, left: Callable[[], int]) -> None:
        self._model, self._left = model, left
        self._thread = 0
        self._since: int | None = None
        self._after: int | None = None

    async def watch(self, worker: Any, core: Any, attempt: bytes) -> None:
        self._thread = await on_engine(worker, lambda _: threading.get_ident())
        worker.runtime.thread.add_poll(self._poll)
        cancel = core.cancel

        def heard(session: Any, cancelled: bytes, *choices: Any) -> None:
            cancel(session, cancelled, *choices)
            if cancelled == attempt:
                self._since = self._model.forwards[self._thread]

        core.cancel = heard

    def _poll(self) -> bool:
        if self._since is not None and self._after is None and not self._left():
            self._after = self._model.forwards[self._thread] - self._since
        return False

    async def steps(self) -> int:
        await eventually(lambda: self._after is not None, "blocks back")
        assert self._after is not None
        return self._after


def held(worker: Any, hogged: int = 0) -> int:
    """Return the number of blocks of requests; call it in the engine's thread."""
    blocks = worker.runtime.engine.stats().blocks
    return int(blocks.used + blocks.reserved - hogged)


async def queued(pair: Pair) -> bytes:
    """Run a request behind another one that has the only place in the batch."""
    other = pair.admit(prompt(4, 1), remote=False, params={"max_tokens": 200})
    await pair.decode.wait("tokens", other)
    attempt = pair.admit(prompt(LONG), remote=False)
    await pair.decode.wait("admitted", attempt)
    assert (await on_engine(pair.decode_worker, lambda e: e.stats())).waiting == 1
    pair.decode.send(wire.DecodeCommand(cancel=wire.CancelAttempt(attempt=other)))
    return attempt


async def prefilling(pair: Pair) -> bytes:
    attempt = pair.admit(prompt(LONG), remote=False)
    worker = pair.decode_worker
    await eventually(lambda: on_engine(worker, lambda e: e.stats().prompt_tokens >= 32))
    assert (await on_engine(worker, lambda e: e.stats())).waiting_tokens > 64
    return attempt


async def decoding(pair: Pair) -> bytes:
    attempt = pair.admit(prompt(20), remote=False, params={"max_tokens": 200})
    await pair.decode.wait("tokens", attempt)
    return attempt


async def receiving(pair: Pair) -> bytes:
    attempt = await pair.hand_off(prompt(LONG))
    await eventually(lambda: on_engine(pair.decode_worker, lambda e: e.stats().blocks.reserved))
    assert await on_engine(pair.prefill_worker, lambda _: held(pair.prefill_worker))
    return attempt


async def claiming(pair: Pair) -> bytes:
    """Run a request that waits for decode's blocks while others hold them."""
    hog = Request(HOG, tuple(prompt(240, 3)), SamplingParams(max_tokens=1), seed=0)
    taken = await on_engine(pair.decode_worker, lambda engine: engine.reserve(hog))
    assert taken is not None
    hogged = await on_engine(pair.decode_worker, lambda _: held(pair.decode_worker))
    attempt = await pair.hand_off(prompt(LONG))
    part: Any = pair.decode_worker.runtime
    await eventually(lambda: claims_of(part.receiver))
    assert await on_engine(pair.decode_worker, lambda _: held(pair.decode_worker)) == hogged
    assert await on_engine(pair.prefill_worker, lambda _: held(pair.prefill_worker))
    return attempt


async def parked(pair: Pair) -> bytes:
    attempt = await decoding(pair)
    await pair.decode.close()
    await eventually(lambda: pair.decode_role.core.leases.figures.parked == 1)
    pair.decode = SessionClient(DecodeStub, pair.decode_worker.address)
    return attempt


@pytest.mark.parametrize(
    "state", [queued, prefilling, decoding, receiving, claiming, parked], ids=lambda f: f.__name__
)
def test_cancelling_frees_the_blocks_at_once(with_pair: Callable[..., None], state: Any) -> None:
    model = Slow()

    async def test(pair: Pair) -> None:
        attempt = await state(pair)
        cancel = wire.CancelAttempt(attempt=attempt)
        hogged = 0
        if state is claiming:
            hogged = await on_engine(pair.decode_worker, lambda _: held(pair.decode_worker))
        elif state is not queued:
            assert await on_engine(pair.decode_worker, lambda _: held(pair.decode_worker))
        decode, prefill = pair.decode_worker, pair.prefill_worker
        freed = [Freed(model, lambda: held(decode, hogged))]
        await freed[0].watch(decode, pair.decode_role.core, attempt)
        if state in (receiving, claiming):
            freed.append(Freed(model, lambda: held(prefill)))
            await freed[1].watch(prefill, pair.prefill_role.core, attempt)
            pair.prefill.send(wire.PrefillCommand(cancel=cancel))
        pair.decode.send(wire.DecodeCommand(cancel=cancel))
        assert max([await side.steps() for side in freed]) <= 1
        assert not pair.decode_role.core.num_served
        await on_engine(pair.decode_worker, lambda engine: engine.abort(HOG))

    engine = {"model": model, "max_running": 1, "num_blocks": 80, "prefix_cache": False}
    with_pair(test, engine=engine)


def test_a_cancelled_follower_is_forgotten_at_once(with_pair: Callable[..., None]) -> None:
    """A follower that waits for the KV of another request has no blocks; the other request
    continues.
    """
    model = Slow()

    async def test(pair: Pair) -> None:
        part: Any = pair.decode_worker.runtime

        def following() -> int:
            return int(part.snapshot()[0].following)

        ids = prompt(LONG)
        leader = await pair.hand_off(ids, shared=4)
        follower = pair.admit(ids, shared=4)
        assert (await pair.decode.wait("admitted", follower)).follows
        assert await on_engine(pair.decode_worker, lambda _: following()) == 1
        freed = Freed(model, following)
        await freed.watch(pair.decode_worker, pair.decode_role.core, follower)
        cancel = wire.CancelAttempt(attempt=follower)
        pair.decode.send(wire.DecodeCommand(cancel=cancel))
        assert await freed.steps() <= 1
        assert pair.decode_role.core.num_served == 1
        cancel = wire.CancelAttempt(attempt=leader)
        pair.decode.send(wire.DecodeCommand(cancel=cancel))
        pair.prefill.send(wire.PrefillCommand(cancel=cancel))
        await pair.at_rest()

    with_pair(test, engine={"model": model, "num_blocks": 256})
