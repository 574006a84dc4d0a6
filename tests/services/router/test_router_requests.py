"""Requests through a real router to fake workers: placing, queueing, cancel, sessions."""

import asyncio
from typing import Any

import pytest

from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire

pytestmark = pytest.mark.anyio


LONG = list(range(600))


SHORT = list(range(20))


async def test_a_short_prompt_stays_local_and_a_long_one_goes_remote(
    make_cluster: Any, expected: Any
) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    prefill = await cluster.prefill()
    gateway = await cluster.gateway()
    await gateway.start("short", SHORT)
    await gateway.start("long", LONG)
    for request, prompt, remote in (("short", SHORT, False), ("long", LONG, True)):
        finished = await gateway.end(request)
        assert finished.remote is remote
        assert gateway.ids(request) == expected(prompt, 8)
        assert gateway.events[request][0].WhichOneof("event") == "placed"
        placed = gateway.of(request, "placed")[0]
        assert placed.placement.decode_incarnation == decode.incarnation
    assert list(prefill.ids.values()) == [LONG[:-1]]
    view = cluster.router.core.view()
    assert (view.prefill_local, view.prefill_remote, view.retries) == (1, 1, 0)
    assert gateway.num_rows == 12, "all tokens of a choice except the first and the last"


async def test_a_gateway_that_reads_no_rows_gets_none(make_cluster: Any, expected: Any) -> None:
    cluster = await make_cluster()
    await cluster.decode()
    gateway = await cluster.gateway(reads_rows=False)
    await gateway.start("r", SHORT)
    await gateway.end("r")
    assert gateway.ids("r") == expected(SHORT, 8)
    assert gateway.num_rows == 0


async def test_a_prompt_longer_than_a_message(make_cluster: Any, expected: Any) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    prefill = await cluster.prefill()
    gateway = await cluster.gateway()
    prompt = [i % 49_000 for i in range(100_000)]
    await gateway.start("huge", prompt)
    assert (await gateway.end("huge")).remote
    assert gateway.ids("huge") == expected(prompt, 8)
    assert list(prefill.ids.values()) == [prompt[:-1]]
    assert len(decode.of("ids_part")) == 3


@pytest.mark.parametrize(
    ("mode", "prompt", "remote"),
    [("never", LONG, False), ("always", SHORT, True), ("always", [7], False)],
)
async def test_remote_prefill_modes(
    make_cluster: Any, mode: str, prompt: list[int], remote: bool
) -> None:
    cluster = await make_cluster(remote_prefill=mode)
    await cluster.decode()
    await cluster.prefill()
    gateway = await cluster.gateway()
    await gateway.start("r", prompt)
    assert (await gateway.end("r")).remote is remote
    assert cluster.router.core.view().prefill_remote == remote


async def test_a_busy_worker_is_skipped(make_cluster: Any, expected: Any) -> None:
    cluster = await make_cluster()
    first, second = await cluster.decode(), await cluster.decode()
    gateway = await cluster.gateway()
    first.busy = second.busy = 2
    await gateway.start("r", SHORT)
    assert isinstance(await gateway.end("r"), pb.Finished)
    assert gateway.ids("r") == expected(SHORT, 8)
    placed = [p.placement.attempt for p in gateway.of("r", "placed")]
    assert placed == list(dict.fromkeys(placed)), "each try names its worker"
    assert len(placed) == len(first.of("admit")) + len(second.of("admit")) > 1
    assert first.busy < 2
    assert second.busy < 2
    assert cluster.router.core.view().retries == 0


async def test_queue_timeout_and_limit(make_cluster: Any, wait_for: Any) -> None:
    cluster = await make_cluster(max_queued=2)
    decode = await cluster.decode()
    decode.busy = 10_000
    gateway = await cluster.gateway()
    for name in ("a", "b"):
        await gateway.start(name, SHORT, queue_remaining_ms=400)
    await decode.until(lambda: decode.busy < 10_000)
    dispatcher = cluster.router.core.dispatcher
    await wait_for(lambda: dispatcher.num_queued == 2)
    await gateway.start("c", SHORT)
    refused = await gateway.end("c")
    assert refused.failure.code == pb.OVERLOADED
    assert refused.failure.retry_after_ms > 0
    for name in ("a", "b"):
        failed = await gateway.end(name)
        assert failed.failure.code == pb.QUEUE_TIMEOUT
    assert dispatcher.num_running == dispatcher.num_queued == 0


async def test_queued_requests_begin_in_order(make_cluster: Any) -> None:
    cluster = await make_cluster()
    gateway = await cluster.gateway()
    names = [f"r{i}" for i in range(20)]
    for name in names:
        await gateway.start(name, SHORT)  # before any worker has joined
    decode = await cluster.decode()
    for name in names:
        assert isinstance(await gateway.end(name), pb.Finished)
    assert [a.start.request for a in decode.of("admit")] == names


async def test_cancel_reaches_both_workers(make_cluster: Any) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    prefill = await cluster.prefill()
    prefill.hang = True
    gateway = await cluster.gateway()
    await gateway.start("r", LONG)
    await prefill.until(lambda: bool(prefill.ids))
    await gateway.cancel("r")
    assert (await gateway.end("r")).failure.code == pb.CANCELLED
    attempt = next(iter(prefill.ids))
    await decode.until(lambda: decode.cancelled == [(attempt, ())])
    await prefill.until(lambda: prefill.cancelled == [(attempt, ())])
    assert cluster.router.core.dispatcher.num_running == 0


async def test_cancel_of_one_choice_goes_to_decode_by_attempt(make_cluster: Any) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    decode.hold_at = 3
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT, n=2)
    await gateway.until(lambda: len(gateway.ids("r", 1)) == 3)
    await gateway.cancel("r", 1)
    await decode.until(lambda: bool(decode.cancelled))
    assert decode.cancelled == [(decode.of("admit")[0].attempt, (1,))]
    decode.released.set()
    assert isinstance(await gateway.end("r"), pb.Finished)
    assert (len(gateway.ids("r", 0)), len(gateway.ids("r", 1))) == (8, 3)


async def test_requests_of_a_lost_gateway_are_cancelled(
    make_cluster: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("pdserve.services.router.request.machine.ORPHAN_S", 0.3)
    cluster = await make_cluster()
    decode = await cluster.decode()
    decode.hold_at = 3
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT)
    await gateway.until(lambda: len(gateway.ids("r")) == 3)
    gateway.call.cancel()
    await decode.until(lambda: bool(decode.cancelled))
    assert decode.cancelled == [(decode.of("admit")[0].attempt, ())]
    assert cluster.router.core.dispatcher.num_running == 0


async def test_a_gateway_returns_and_issues_its_requests_again(
    make_cluster: Any, expected: Any
) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    decode.hold_at = 3
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT, epoch=1)
    await gateway.until(lambda: len(gateway.ids("r")) == 3)
    gateway.call.cancel()
    again = await cluster.gateway(incarnation=gateway.incarnation)
    have = pb.ChoiceState(generated_ids=gateway.ids("r"))
    await again.start("r", SHORT, epoch=2, choices=[have])
    await decode.until(lambda: bool(decode.of("resume")))
    decode.released.set()
    finished = await again.end("r")
    assert finished.epoch == 2
    tail = [i for tokens in again.of("r", "tokens") for i in tokens.ids]
    assert gateway.ids("r") + tail == expected(SHORT, 8)
    assert len(decode.of("admit")) == 1
    assert not decode.cancelled
    assert cluster.router.core.dispatcher.num_adopted == 1


async def test_epochs(make_cluster: Any) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    decode.hold_at = 3
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT, epoch=5)
    await gateway.until(lambda: len(gateway.ids("r")) == 3)
    await gateway.start("r", SHORT, epoch=4)  # late: ignored
    await gateway.start("r", SHORT, epoch=5)  # repeated: ignored
    dispatcher = cluster.router.core.dispatcher
    await gateway.start("other", SHORT, max_tokens=2)
    await gateway.end("other")
    assert dispatcher.num_stale == 2
    assert len(decode.of("admit")) == 2
    decode.released.set()
    assert (await gateway.end("r")).epoch == 5


async def test_unknown_attempts_are_counted_and_ignored(
    make_cluster: Any, expected: Any, wait_for: Any
) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    prefill = await cluster.prefill()
    gateway = await cluster.gateway()
    stranger = b"?" * 16
    decode.put(wire.DecodeEvent(finished=pb.Finished(attempt=stranger)))
    decode.put(wire.DecodeEvent(tokens=pb.Tokens(attempt=stranger, ids=[1])))
    prefill.put(wire.PrefillEvent(failed=wire.PrefillFailed(attempt=stranger)))
    await gateway.start("r", SHORT)
    await gateway.end("r")
    assert gateway.ids("r") == expected(SHORT, 8)
    await wait_for(lambda: cluster.router.core.dispatcher.num_stale == 3)
    assert list(gateway.events) == ["r"]


async def test_several_models_in_one_fleet(make_cluster: Any) -> None:
    cluster = await make_cluster(remote_prefill="always")
    small = await cluster.decode("small", b"one")
    large = await cluster.decode("large", b"two")
    for_large = await cluster.prefill("large", b"two")
    foreign = await cluster.prefill("small", b"other weights")
    gateway = await cluster.gateway()
    await gateway.start("a", SHORT, model="small")
    await gateway.start("b", SHORT, model="large")
    await gateway.start("c", SHORT, model="none")
    assert not (await gateway.end("a")).remote
    assert (await gateway.end("b")).remote
    assert (await gateway.end("c")).failure.code == pb.MODEL_NOT_FOUND
    assert (len(small.of("admit")), len(large.of("admit"))) == (1, 1)
    assert (len(for_large.ids), len(foreign.ids)) == (1, 0)
    assert [m.name for m in cluster.router.core.models()] == ["large", "small"]


async def test_a_draining_worker_gets_no_new_work(
    make_cluster: Any, expected: Any, wait_for: Any
) -> None:
    cluster = await make_cluster()
    leaving = await cluster.decode()
    leaving.hold_at = 3
    gateway = await cluster.gateway()
    await gateway.start("old", SHORT)
    await gateway.until(lambda: len(gateway.ids("old")) == 3)
    leaving.membership.announce_drain()
    fleet = cluster.router.core.fleet
    await wait_for(lambda: fleet.get(leaving.incarnation).state.value == "draining")
    staying = await cluster.decode()
    await gateway.start("new", SHORT)
    await gateway.end("new")
    assert len(staying.of("admit")) == 1
    leaving.released.set()
    assert isinstance(await gateway.end("old"), pb.Finished)
    assert gateway.ids("old") == expected(SHORT, 8)


async def test_a_worker_restarts_on_the_same_address(make_cluster: Any, expected: Any) -> None:
    cluster = await make_cluster()
    first = await cluster.decode()
    first.hold_at = 3
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT)
    await gateway.until(lambda: len(gateway.ids("r")) == 3)
    port = int(first.address.rpartition(":")[2])
    await first.kill()
    second = await cluster.decode(port=port)
    assert second.incarnation != first.incarnation
    assert isinstance(await gateway.end("r"), pb.Finished)
    assert gateway.ids("r") == expected(SHORT, 8)
    assert list(cluster.router.core.fleet.workers) == [second.incarnation]


async def test_a_deadline_is_passed_on_and_ends_a_queued_request(make_cluster: Any) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT, remaining_ms=60_000)
    await gateway.end("r")
    assert 50_000 < decode.of("admit")[0].start.remaining_ms <= 60_000
    decode.busy = 10_000
    await gateway.start("late", SHORT, remaining_ms=300)
    assert (await gateway.end("late")).failure.code == pb.DEADLINE_EXCEEDED


async def test_prompt_logprobs_stay_local_and_arrive_once(make_cluster: Any) -> None:
    cluster = await make_cluster(remote_prefill="always")
    await cluster.decode()
    await cluster.prefill()
    gateway = await cluster.gateway()
    params = pb.SamplingParams(prompt_logprobs=1)
    await gateway.start("r", LONG, params=params)
    assert not (await gateway.end("r")).remote


async def test_a_worker_given_up_by_mistake_joins_again(make_cluster: Any, wait_for: Any) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    gateway = await cluster.gateway()
    core = cluster.router.core
    before = core.fleet.get(decode.incarnation)
    core.refused(before)  # as after a partition that has since healed
    await wait_for(lambda: core.fleet.get(decode.incarnation) not in (None, before))
    await gateway.start("r", SHORT)
    assert isinstance(await gateway.end("r"), pb.Finished)


async def test_many_mixed_requests_release_everything(make_cluster: Any, expected: Any) -> None:
    cluster = await make_cluster()
    decodes = [await cluster.decode() for _ in range(2)]
    prefills = [await cluster.prefill() for _ in range(2)]
    gateway = await cluster.gateway()
    decodes[0].busy, prefills[0].fail = 20, 5
    for number in range(200):
        prompt = LONG if number % 3 == 0 else SHORT
        await gateway.start(f"r{number}", prompt, max_tokens=30, n=1 + number % 2)
        if number % 10 == 9:
            await gateway.cancel(f"r{number}")
    ends = [await gateway.end(f"r{number}") for number in range(200)]
    cancelled = [e for e in ends if isinstance(e, pb.Failed)]
    assert {e.failure.code for e in cancelled} <= {pb.CANCELLED}
    assert len(cancelled) <= 20
    for number, end in enumerate(ends):
        if isinstance(end, pb.Finished):
            prompt = LONG if number % 3 == 0 else SHORT
            assert gateway.ids(f"r{number}") == expected(prompt, 30)
    assert decodes[0].busy < 20
    assert prefills[0].fail < 5
    dispatcher = cluster.router.core.dispatcher
    assert dispatcher.num_running == dispatcher.num_queued == 0
    assert not dispatcher.attempts
    assert not dispatcher.placer.admitting
    assert not any(w.unreported for w in cluster.router.core.fleet.workers.values())
    assert sum(dispatcher.outcomes.values()) == 200


async def test_time_in_the_router_counts_as_queueing(make_cluster: Any) -> None:
    cluster = await make_cluster(remote_prefill="always")
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT)
    await asyncio.sleep(0.3)  # no worker yet
    before = asyncio.get_running_loop().time()
    await cluster.decode()
    finished = await gateway.end("r")
    after = asyncio.get_running_loop().time()
    assert 0.25 < finished.phases.queue_s < 0.35 + after - before
