"""Workers that fail, die or come back: what the router does with their requests."""

from typing import Any

import pytest

from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire
from pdserve.services.router.fleet import worker_sessions

pytestmark = pytest.mark.anyio


LONG = list(range(600))


SHORT = list(range(20))


async def test_a_failed_prefill_moves_to_another_worker_then_stays_local(
    make_cluster: Any, expected: Any
) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    prefills = [await cluster.prefill() for _ in range(3)]
    for prefill in prefills:
        prefill.fail = 10
    gateway = await cluster.gateway()
    await gateway.start("r", LONG)
    finished = await gateway.end("r")
    assert not finished.remote
    assert gateway.ids("r") == expected(LONG, 8)
    assert sorted(len(p.ids) for p in prefills) == [0, 1, 1]
    attempts = [admit.attempt for admit in decode.of("admit")]
    assert len(set(attempts)) == 3
    assert [c[0] for c in decode.cancelled] == attempts[:2]
    assert len(gateway.of("r", "placed")) == 3
    assert cluster.router.core.view().retries == 2


async def test_prefill_worker_dies_during_transfer(make_cluster: Any, expected: Any) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    prefill = await cluster.prefill()
    prefill.hang = True
    gateway = await cluster.gateway()
    await gateway.start("r", LONG)
    await prefill.until(lambda: bool(prefill.ids))
    assert decode.arrived
    await prefill.kill()
    finished = await gateway.end("r")
    assert not finished.remote
    assert gateway.ids("r") == expected(LONG, 8)
    assert len(decode.cancelled) == 1


async def test_a_lost_handoff_is_retried(make_cluster: Any, expected: Any) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    first = await cluster.prefill()
    first.hang = True
    gateway = await cluster.gateway()
    await gateway.start("r", LONG)
    await first.until(lambda: bool(first.ids))
    second = await cluster.prefill()
    attempt = next(iter(first.ids))
    lost = wire.HandoffLost(attempt=attempt, reason="no progress")
    decode.tasks.pop(attempt).cancel()
    decode.put(wire.DecodeEvent(handoff_lost=lost))
    assert (await gateway.end("r")).remote
    assert gateway.ids("r") == expected(LONG, 8)
    assert len(second.ids) == 1
    assert first.cancelled == [(attempt, ())]
    assert not decode.cancelled


@pytest.mark.parametrize("n", [1, 3])
async def test_decode_worker_dies_mid_stream(make_cluster: Any, expected: Any, n: int) -> None:
    cluster = await make_cluster()
    dying = await cluster.decode()
    dying.hold_at = 5
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT, max_tokens=12, n=n)
    await gateway.until(lambda: all(len(gateway.ids("r", c)) == 5 for c in range(n)))
    survivor = await cluster.decode()
    await dying.kill()
    assert isinstance(await gateway.end("r"), pb.Finished)
    for choice in range(n):
        assert gateway.ids("r", choice) == expected(SHORT, 12, choice)
    (admit,) = survivor.of("admit")
    assert [len(c.generated_ids) for c in admit.start.choices] == [5] * n
    assert admit.start.crash_count == 1
    placed = gateway.of("r", "placed")
    assert [p.placement.decode_incarnation for p in placed] == [
        dying.incarnation,
        survivor.incarnation,
    ]


async def test_remote_resume_prefills_the_generated_tokens(
    make_cluster: Any, expected: Any
) -> None:
    cluster = await make_cluster()
    dying = await cluster.decode()
    dying.hold_at = 5
    gateway = await cluster.gateway()
    await gateway.start("r", LONG, max_tokens=12)
    await gateway.until(lambda: len(gateway.ids("r")) == 5)
    await cluster.decode()
    prefill = await cluster.prefill()
    await dying.kill()
    assert (await gateway.end("r")).remote
    ids = expected(LONG, 12)
    assert gateway.ids("r") == ids
    assert list(prefill.ids.values()) == [[*LONG, *ids[:4]]]


async def test_after_two_crashes_a_request_is_given_up(make_cluster: Any, expected: Any) -> None:
    cluster = await make_cluster()
    gateway = await cluster.gateway()
    victims = []
    for crash in (1, 2):
        victims.append(await cluster.decode(hold_at=2 * crash))
        if crash == 1:
            await gateway.start("r", SHORT)
        await gateway.until(lambda: len(gateway.ids("r")) == 2 * len(victims))
        await victims[-1].kill()
    third = await cluster.decode()
    assert (await gateway.end("r")).failure.code == pb.POISON_REQUEST
    assert victims[1].of("admit")[0].start.crash_count == 1
    assert gateway.ids("r") == expected(SHORT, 4)
    assert not third.of("admit")


async def test_a_dead_worker_that_has_not_begun_is_no_crash(make_cluster: Any) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    prefill = await cluster.prefill()
    prefill.hang = True
    gateway = await cluster.gateway()
    await gateway.start("r", LONG)
    await prefill.until(lambda: bool(prefill.ids))
    prefill.hang = False
    other = await cluster.decode()
    prefill.decodes.append(other)
    await decode.kill()
    assert isinstance(await gateway.end("r"), pb.Finished)
    (admit,) = other.of("admit")
    assert admit.start.crash_count == 0
    assert len(prefill.cancelled) == 1


async def test_broken_session_of_a_living_worker(make_cluster: Any, expected: Any) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    decode.hold_at = 3
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT)
    await gateway.until(lambda: len(gateway.ids("r")) == 3)
    decode.released.set()
    decode.outboxes[-1].close()
    assert isinstance(await gateway.end("r"), pb.Finished)
    assert gateway.ids("r") == expected(SHORT, 8)
    assert len(decode.outboxes) == 2
    (admit,) = decode.of("admit")
    (resume,) = decode.of("resume")
    assert resume.attempt == admit.attempt, "no attempt was retried"
    assert list(resume.counts) == [3]
    assert resume.epoch > admit.start.epoch


async def test_an_event_that_the_router_cannot_process_breaks_only_its_session(
    make_cluster: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    gateway = await cluster.gateway()
    dispatcher = cluster.router.core.dispatcher
    take, failed = dispatcher.on_decode, []

    def on_decode(worker: Any, event: wire.DecodeEvent, now: float) -> None:
        if event.HasField("tokens") and not failed:
            failed.append(event)
            raise KeyError("nobody foresaw this")
        take(worker, event, now)

    monkeypatch.setattr(dispatcher, "on_decode", on_decode)
    await gateway.start("r", SHORT)
    await gateway.end("r")
    assert failed
    assert gateway.ids("r") == expected(SHORT, 8)
    assert len(decode.of("resume")) == 1


async def test_a_broken_session_with_prefill_is_resumed(
    make_cluster: Any, expected: Any, wait_for: Any
) -> None:
    cluster = await make_cluster(remote_prefill="always")
    decode = await cluster.decode()
    prefill = await cluster.prefill()
    prefill.hang = True
    gateway = await cluster.gateway()
    await gateway.start("r", LONG)
    await wait_for(lambda: prefill.num_hung == 1)
    prefill.hang = False
    prefill.outboxes[-1].close()
    assert isinstance(await gateway.end("r"), pb.Finished)
    assert gateway.ids("r") == expected(LONG, 8)
    first, again = prefill.of("start")
    assert first.attempt == again.attempt
    assert first.ticket == again.ticket
    assert len(decode.of("admit")) == 1


async def test_a_worker_that_dies_after_its_session_broke_counts_as_a_crash(
    make_cluster: Any, expected: Any, wait_for: Any
) -> None:
    """The router notices the broken session before the port that refuses."""
    cluster = await make_cluster()
    decode = await cluster.decode()
    decode.hold_at = 3
    decode.mute = True
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT)
    await gateway.until(lambda: len(gateway.ids("r")) == 3)
    decode.outboxes[-1].close()
    await wait_for(lambda: decode.of("resume"))
    other = await cluster.decode()
    await decode.kill()
    assert isinstance(await gateway.end("r"), pb.Finished)
    assert gateway.ids("r") == expected(SHORT, 8)
    (admit,) = other.of("admit")
    assert admit.start.crash_count == 1


async def test_a_request_cancelled_while_its_session_is_down_is_cancelled_in_the_next(
    make_cluster: Any, wait_for: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(worker_sessions, "RETRY_S", 0.5)
    cluster = await make_cluster()
    decode = await cluster.decode()
    decode.hold_at = 3
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT)
    await gateway.until(lambda: len(gateway.ids("r")) == 3)
    decode.outboxes[-1].close()
    worker = next(iter(cluster.router.core.fleet.workers.values()))
    await wait_for(lambda: not worker.connected)
    await gateway.cancel("r")
    assert (await gateway.end("r")).failure.code == pb.CANCELLED
    assert not decode.cancelled
    await wait_for(lambda: decode.cancelled)
    assert len(decode.outboxes) == 2


def verify(decode: Any, attempt: bytes, tokens: int, cached: int = 0) -> None:
    verified = wire.Verified(attempt=attempt, tokens=tokens, cached_tokens=cached)
    decode.put(wire.DecodeEvent(verified=verified))


@pytest.mark.parametrize(("tokens", "where"), [(32, "remote"), (320, "decode")])
async def test_after_a_dead_prefill_the_cheaper_side_continues(
    make_cluster: Any, expected: Any, wait_for: Any, tokens: int, where: str
) -> None:
    """Another prefill worker has none of the prefix: it starts over if the prefix is short."""
    cluster = await make_cluster(remote_prefill="always")
    decode = await cluster.decode()
    dying = await cluster.prefill()
    dying.hang = True
    gateway = await cluster.gateway()
    await gateway.start("r", LONG)
    await dying.until(lambda: bool(dying.ids))
    other = await cluster.prefill()
    (attempt,) = dying.ids
    verify(decode, attempt, tokens, 16)
    (routed,) = cluster.router.core.dispatcher.requests
    await wait_for(lambda: routed.verified == {decode.incarnation: tokens})
    await dying.kill()
    finished = await gateway.end("r")
    assert gateway.ids("r") == expected(LONG, 8)
    assert finished.remote == (where == "remote") == bool(other.ids)
    reason = "remote prefill" if where == "remote" else "decode goes on"
    assert cluster.router.core.dispatcher.placer.reasons[reason] == 1 + (where == "remote")


async def test_a_slow_prefill_is_replaced(make_cluster: Any, expected: Any) -> None:
    """Decode reports its verified blocks before it gives up, so both messages come in order."""
    cluster = await make_cluster()
    decode = await cluster.decode()
    slow = await cluster.prefill()
    slow.hang = True
    gateway = await cluster.gateway()
    await gateway.start("r", LONG)
    await slow.until(lambda: bool(slow.ids))
    other = await cluster.prefill()
    (attempt,) = slow.ids
    decode.tasks.pop(attempt).cancel()
    verify(decode, attempt, 400)
    lost = wire.HandoffLost(attempt=attempt, reason="prefill slow")
    decode.put(wire.DecodeEvent(handoff_lost=lost))
    assert not (await gateway.end("r")).remote
    assert gateway.ids("r") == expected(LONG, 8)
    assert not other.ids
    assert slow.cancelled == [(attempt, ())]
    assert not decode.cancelled


async def test_blocks_of_an_earlier_try_are_no_cache_hit(make_cluster: Any, wait_for: Any) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    decode.cached_tokens = 560  # found at the second try
    dying = await cluster.prefill()
    dying.hang = True
    gateway = await cluster.gateway()
    await gateway.start("r", LONG)
    await dying.until(lambda: bool(dying.ids))
    (attempt,) = dying.ids
    verify(decode, attempt, 320, 32)
    verify(decode, attempt, 560, 32)
    (routed,) = cluster.router.core.dispatcher.requests
    await wait_for(lambda: routed.verified == {decode.incarnation: 560})
    await dying.kill()
    assert (await gateway.end("r")).cached_tokens == 32
    await gateway.start("again", LONG)
    assert (await gateway.end("again")).cached_tokens == 560


async def test_blocks_of_a_try_that_decode_forgot_are_no_cache_hit(make_cluster: Any) -> None:
    """Nothing was verified before the session broke, and decode answers Gone."""
    cluster = await make_cluster()
    decode = await cluster.decode()
    decode.hold_at = 0
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT)
    await decode.until(lambda: bool(decode.of("admit")))
    await gateway.until(lambda: bool(gateway.of("r", "placed")))
    decode.cached_tokens = 16  # found at the second try
    decode.said.clear()
    decode.released.set()
    decode.outboxes[-1].close()
    assert (await gateway.end("r")).cached_tokens == 0
    assert len(decode.of("admit")) == 2
