"""Routers that die or lose a session: their requests' attempts are adopted, not retried."""

from typing import Any

import pytest

from pdserve.protos import common_pb2 as pb
from pdserve.services.router import dispatcher
from pdserve.services.router.request import machine
from pdserve.services.router.request.state import MAX_SESSIONS

pytestmark = pytest.mark.anyio


LONG = list(range(600))
SHORT = list(range(20))


def have(gateway: Any, request: str, n: int = 1) -> list[pb.ChoiceState]:
    return [pb.ChoiceState(generated_ids=gateway.ids(request, c)) for c in range(n)]


async def issue_again(
    cluster: Any, old: Any, request: str, prompt: list[int], **fields: Any
) -> Any:
    """Issue a request again as a gateway does after a lost session: with its ids and a higher
    epoch.
    """
    placement = old.of(request, "placed")[-1].placement
    gateway = await cluster.gateway(incarnation=old.incarnation)
    fields = {"epoch": 1, "remaining_ms": 60_000, "placement": placement} | fields
    await gateway.start(request, prompt, max_tokens=12, **fields)
    return gateway


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_is_adopted_after_a_restart(
    make_cluster: Any, expected: Any, n: int
) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode(hold_at=5)
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT, max_tokens=12, n=n)
    await gateway.until(lambda: all(len(gateway.ids("r", c)) == 5 for c in range(n)))
    await cluster.restart()
    again = await issue_again(cluster, gateway, "r", SHORT, n=n, choices=have(gateway, "r", n))
    decode.released.set()
    assert isinstance(await again.end("r"), pb.Finished)
    for choice in range(n):
        tokens = [t for t in again.of("r", "tokens") if t.choice == choice]
        assert tokens[0].position == 5
        ids = gateway.ids("r", choice) + [i for t in tokens for i in t.ids]
        assert ids == expected(SHORT, 12, choice)
    assert {t.epoch for t in again.of("r", "tokens")} == {1}
    (resume,) = decode.of("resume")
    assert (resume.epoch, list(resume.counts)) == (MAX_SESSIONS, [5] * n)
    assert len(decode.of("admit")) == 1
    (placed,) = again.of("r", "placed")
    assert placed.placement == gateway.of("r", "placed")[0].placement
    dispatch = cluster.router.core.dispatcher
    assert (dispatch.num_adopted, dispatch.num_retries) == (1, 0)
    assert not dispatch.prefills, "the previous router counted it"
    assert not cluster.router.core.dispatcher.attempts


async def test_a_request_that_finished_meanwhile_is_reported(
    make_cluster: Any, expected: Any
) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode(hold_at=5)
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT, max_tokens=12)
    await gateway.until(lambda: len(gateway.ids("r")) == 5)
    await cluster.restart()
    decode.released.set()
    await decode.until(lambda: not decode.tasks)
    again = await issue_again(cluster, gateway, "r", SHORT, choices=have(gateway, "r"))
    assert isinstance(await again.end("r"), pb.Finished)
    ids = gateway.ids("r") + [i for t in again.of("r", "tokens") for i in t.ids]
    assert ids == expected(SHORT, 12)
    assert len(decode.of("admit")) == 1


async def test_an_end_that_was_lost_is_resent(make_cluster: Any, expected: Any) -> None:
    """The session breaks with Placed and all later messages in flight: the router still knows the
    worker.
    """
    cluster = await make_cluster()
    decode = await cluster.decode()
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT, max_tokens=12)
    await gateway.end("r")
    again = await cluster.gateway(incarnation=gateway.incarnation)
    await again.start("r", SHORT, max_tokens=12, epoch=1)
    assert isinstance(await again.end("r"), pb.Finished)
    assert again.ids("r") == expected(SHORT, 12)
    assert len(decode.of("resume")) == len(decode.of("admit")) == 1


async def test_a_request_that_decode_has_not_answered_continues(
    make_cluster: Any, expected: Any
) -> None:
    """Issued again between Admit and Admitted, under a session that never received Placed."""
    cluster = await make_cluster()
    decode = await cluster.decode()
    decode.answering.clear()
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT, max_tokens=12)
    await decode.until(lambda: len(decode.of("admit")) == 1)
    again = await cluster.gateway(incarnation=gateway.incarnation)
    await again.start("r", SHORT, max_tokens=12, epoch=1)
    dispatch = cluster.router.core.dispatcher
    await again.start("other", SHORT, max_tokens=1)  # so the previous Start has arrived, too
    await decode.until(lambda: len(decode.of("admit")) == 2)
    decode.answering.set()
    finished = await again.end("r")
    assert (finished.epoch, again.ids("r")) == (1, expected(SHORT, 12))
    await again.end("other")
    assert len(decode.of("admit")) == 2
    assert not decode.cancelled
    assert not dispatch.num_retries
    assert not gateway.of("r", "finished")


async def hand_off_under_way(make_cluster: Any) -> tuple[Any, Any, Any, Any]:
    """Return (cluster, decode, prefill, gateway): prefill has request "r" and does not answer."""
    cluster = await make_cluster()
    decode = await cluster.decode()
    prefill = await cluster.prefill()
    prefill.hang = True
    gateway = await cluster.gateway()
    await gateway.start("r", LONG, max_tokens=12)
    await prefill.until(lambda: bool(prefill.ids))
    await gateway.until(lambda: bool(gateway.of("r", "placed")))
    return cluster, decode, prefill, gateway


@pytest.mark.parametrize("known", [True, False])
async def test_a_hand_off_continues_after_a_restart(
    make_cluster: Any, expected: Any, known: bool
) -> None:
    """`known`: prefill has the attempt; otherwise the router died before it sent PrefillStart."""
    cluster, decode, prefill, gateway = await hand_off_under_way(make_cluster)
    if not known:
        prefill.ids.clear()
    prefill.hang = False
    await cluster.restart()
    again = await issue_again(cluster, gateway, "r", LONG)
    assert (await again.end("r")).remote
    assert again.ids("r") == expected(LONG, 12)
    first, second = prefill.of("start")
    assert (first.attempt, first.ticket) == (second.attempt, second.ticket)
    assert prefill.ids[first.attempt] == LONG[:-1]
    assert len(decode.of("admit")) == 1
    assert not decode.cancelled
    assert not prefill.cancelled
    assert cluster.router.core.view().prefill_remote == 1


async def test_a_hand_off_that_ended_at_prefill_meanwhile_is_retried(
    make_cluster: Any, expected: Any
) -> None:
    """Decode still waits for its KV; prefill resends how it ended."""
    cluster, decode, prefill, gateway = await hand_off_under_way(make_cluster)
    prefill.hang, prefill.fail = False, 1
    await cluster.restart()
    again = await issue_again(cluster, gateway, "r", LONG)
    assert isinstance(await again.end("r"), pb.Finished)
    assert again.ids("r") == expected(LONG, 12)
    first, again_said = prefill.of("start")[:2]
    assert first.attempt == again_said.attempt
    lost, other = decode.of("admit")
    assert lost.attempt == first.attempt != other.attempt
    assert [cancelled[0] for cancelled in decode.cancelled] == [lost.attempt]
    assert cluster.router.core.dispatcher.num_adopted == 1


async def test_a_request_stops_waiting_for_a_prefill_worker_that_never_joins(
    make_cluster: Any, expected: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(dispatcher, "YOUNG_S", 1.0)
    cluster = await make_cluster()
    await cluster.decode()
    prefill = await cluster.prefill()
    prefill.hang = True
    gateway = await cluster.gateway()
    await gateway.start("r", LONG, max_tokens=12)
    await prefill.until(lambda: bool(prefill.ids))
    await gateway.until(lambda: bool(gateway.of("r", "placed")))
    await prefill.kill()
    await gateway.close()
    cluster.gateways.remove(gateway)
    await cluster.restart()
    again = await issue_again(cluster, gateway, "r", LONG)
    assert not (await again.end("r")).remote
    assert again.ids("r") == expected(LONG, 12)
    assert cluster.router.core.dispatcher.num_adopted == 1


@pytest.mark.parametrize("why", ["gone", "mute", "dead"])
async def test_an_attempt_that_cannot_be_adopted_is_placed_again(
    make_cluster: Any, expected: Any, monkeypatch: Any, why: str
) -> None:
    monkeypatch.setattr(dispatcher, "YOUNG_S", 1.0)
    monkeypatch.setattr(machine, "ANSWER_S", 0.3)
    cluster = await make_cluster()
    decode = await cluster.decode(hold_at=5)
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT, max_tokens=12)
    await gateway.until(lambda: len(gateway.ids("r")) == 5)
    (attempt,) = decode.said
    if why == "gone":
        decode.said.clear()
    decode.mute = why == "mute"
    if why == "dead":
        await decode.kill()
    await cluster.restart()
    decode.released.set()
    other = await cluster.decode() if why == "dead" else decode
    again = await issue_again(cluster, gateway, "r", SHORT, choices=have(gateway, "r"))
    assert isinstance(await again.end("r"), pb.Finished)
    ids = gateway.ids("r") + [i for t in again.of("r", "tokens") for i in t.ids]
    assert ids == expected(SHORT, 12)
    (admit,) = [a for a in other.of("admit") if a.attempt != attempt]
    assert list(admit.start.choices[0].generated_ids) == expected(SHORT, 5)
    assert not admit.start.HasField("placement")
    assert cluster.router.core.dispatcher.num_adopted == 0
    assert (attempt, ()) in decode.cancelled or why != "mute", "an answer would come too late"


async def test_a_worker_of_another_replica_is_not_waited_for(
    make_cluster: Any, expected: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(dispatcher, "YOUNG_S", 0.0)
    monkeypatch.setattr(machine, "SEEK_S", 30.0)
    cluster = await make_cluster()
    await cluster.decode()
    gateway = await cluster.gateway()
    placement = pb.Placement(attempt=b"a" * 16, decode_incarnation=b"b" * 16, decode_address="x:1")
    await gateway.start("r", SHORT, epoch=4, placement=placement)
    await gateway.end("r")
    assert gateway.ids("r") == expected(SHORT, 8)


async def test_a_gateway_that_returns_to_the_same_router_continues(
    make_cluster: Any, expected: Any
) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode(hold_at=5)
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT, max_tokens=12)
    await gateway.until(lambda: len(gateway.ids("r")) == 5)
    again = await issue_again(cluster, gateway, "r", SHORT, choices=have(gateway, "r"))
    await decode.until(lambda: bool(decode.of("resume")))
    decode.released.set()
    assert isinstance(await again.end("r"), pb.Finished)
    ids = gateway.ids("r") + [i for t in again.of("r", "tokens") for i in t.ids]
    assert ids == expected(SHORT, 12)
    assert not decode.cancelled
    assert len(decode.of("admit")) == 1


async def test_choices_that_ended_meanwhile_are_cancelled_at_decode(
    make_cluster: Any, expected: Any
) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode(hold_at=5)
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT, max_tokens=12, n=2)
    await gateway.until(lambda: all(len(gateway.ids("r", c)) == 5 for c in range(2)))
    await cluster.restart()
    choices = have(gateway, "r", 2)
    choices[1].finish = pb.ABORTED
    again = await issue_again(cluster, gateway, "r", SHORT, n=2, choices=choices)
    await decode.until(lambda: bool(decode.cancelled))
    decode.released.set()
    assert isinstance(await again.end("r"), pb.Finished)
    assert [c[1] for c in decode.cancelled] == [(1,)]
    assert {t.choice for t in again.of("r", "tokens")} == {0}


async def test_crash_counts_survive_a_router(make_cluster: Any, expected: Any) -> None:
    cluster = await make_cluster()
    first = await cluster.decode(hold_at=2)
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT, max_tokens=12)
    await gateway.until(lambda: len(gateway.ids("r")) == 2)
    second = await cluster.decode(hold_at=4)
    await first.kill()
    await gateway.until(lambda: len(gateway.ids("r")) == 4)
    placed = gateway.of("r", "placed")
    assert [p.crash_count for p in placed] == [0, 1]
    await cluster.restart()
    again = await issue_again(
        cluster, gateway, "r", SHORT, choices=have(gateway, "r"), crash_count=placed[-1].crash_count
    )
    await second.until(lambda: bool(second.of("resume")))
    await again.until(lambda: bool(again.of("r", "placed")))
    third = await cluster.decode()
    await second.kill()
    assert (await again.end("r")).failure.code == pb.POISON_REQUEST
    assert not third.of("admit")
