"""Requests of lost router sessions: parked, adopted by another session, or given up."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fakes.decoder import FakeDecoder, fake_spec
from systems.eventually import LIMIT_S, eventually
from systems.parking import (
    EPOCH,
    another,
    ask_again,
    engine_stats,
    figures,
    heard,
    load,
    lose,
    served_by,
)
from systems.worker_kit import Pair, SessionClient, expected, prompt

from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.worker_pb2_grpc import PrefillStub
from pdserve.services.decode.leases import LeaseFigures

SAMPLED = {"n": 2, "temperature": 1.0, "max_tokens": 100, "logprobs": 2}


class Slow(FakeDecoder):
    """Takes ten milliseconds per step, so that a session can break in the middle."""

    def forward(self, batch: Any, kv: Any) -> Any:
        threading.Event().wait(0.01)
        return super().forward(batch, kv)


def slow() -> dict[str, Any]:
    return {"model": Slow(fake_spec())}


def test_an_adopted_stream_is_complete_and_nothing_is_recomputed(
    with_pair: Callable[..., None],
) -> None:
    async def test(pair: Pair) -> None:
        ids = prompt(50)
        attempt = pair.admit(ids, remote=False, params=SAMPLED, seed=7)
        await eventually(lambda: len(heard(pair.decode, attempt).get(0, {})) > 3)
        before = (await engine_stats(pair)).prompt_tokens
        await lose(pair)
        stats = await engine_stats(pair)
        assert (stats.running, stats.parked) == (0, 1)
        assert stats.blocks.used > 0
        assert (await load(pair)).parked == 1
        first = heard(pair.decode, attempt)
        counts = [max(0, len(first.get(choice, {})) - 1) for choice in range(2)]
        assert 0 < max(counts) < 90, "the session must break in the middle"

        client = another(pair)
        ask_again(client, attempt, counts)
        resumed = await client.wait("resumed", attempt)
        assert (resumed.epoch, resumed.HasField("ticket")) == (EPOCH + 1, False)
        await client.wait("finished", attempt)
        second = heard(client, attempt)
        found = {c: {**first[c], **second[c]} for c in range(2)}
        tokens = {c: [found[c][at][0] for at in range(100)] for c in range(2)}
        assert tokens == expected(ids, seed=7, **SAMPLED)
        assert min(second[0]) == counts[0], "tokens start at the requested count"
        assert all(score for choice in found.values() for _, score in choice.values())
        overlap = [at for at in first[0] if at in second[0]]
        assert overlap
        assert all(first[0][at] == second[0][at] for at in overlap)
        assert {m.epoch for k, m in client.events if k == "tokens"} == {EPOCH + 1}
        stats = await engine_stats(pair)
        assert stats.prompt_tokens == before == 50
        assert figures(pair) == LeaseFigures(adopted=1)
        report = await load(pair)
        assert (report.parked, report.adopted) == (0, 1)
        await client.close()
        await pair.at_rest()

    with_pair(test, engine=slow())


@pytest.mark.parametrize("started", [True, False])
def test_a_hand_off_continues_and_its_request_waits(
    with_pair: Callable[..., None], started: bool
) -> None:
    """`started`: prefill had begun when the router died; otherwise the router had only the
    Admitted.
    """

    async def test(pair: Pair) -> None:
        ids = prompt(90)
        attempt = pair.admit(ids)
        admitted = await pair.decode.wait("admitted", attempt)
        if started:
            pair.start_prefill(attempt, ids[:-1], admitted.ticket)
            await pair.prefill.wait("accepted", attempt)
        await lose(pair)
        assert "tokens" not in pair.decode.kinds(attempt)
        if started:
            await pair.prefill.wait("done", attempt)
            assert (await engine_stats(pair)).generation_tokens == 0
        client = another(pair)
        ask_again(client, attempt)
        resumed = await client.wait("resumed", attempt)
        assert resumed.HasField("ticket") != started
        if not started:
            assert resumed.prefill_incarnation == pair.prefill_worker.incarnation
            assert resumed.ticket == admitted.ticket
            pair.start_prefill(attempt, ids[:-1], resumed.ticket)
        finished = await client.wait("finished", attempt)
        assert finished.remote
        assert client.tokens(attempt) == expected(ids)
        assert (await engine_stats(pair)).prompt_tokens == 1
        await client.close()
        await pair.at_rest()

    with_pair(test, engine=slow())


def test_a_repeated_prefill_start_begins_nothing(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        ids = prompt(90)
        attempt = pair.admit(ids)
        admitted = await pair.decode.wait("admitted", attempt)
        pair.start_prefill(attempt, ids[:-1], admitted.ticket)
        await pair.prefill.wait("accepted", attempt)
        old, pair.prefill = pair.prefill, SessionClient(PrefillStub, pair.prefill_worker.address)
        pair.start_prefill(attempt, ids[:-1], admitted.ticket)
        await pair.prefill.wait("accepted", attempt)
        cancel = wire.PrefillCommand(cancel=wire.CancelAttempt(attempt=attempt))
        old.send(cancel)  # the attempt no longer belongs to that session
        await pair.decode.wait("finished", attempt)
        await pair.prefill.wait("done", attempt)
        assert old.kinds() == ["accepted"]
        pair.start_prefill(attempt, ids[:-1], admitted.ticket)
        await eventually(lambda: pair.prefill.kinds() == ["accepted", "done", "done"])
        part: Any = pair.prefill_worker.runtime
        assert part.thread.post(lambda e: e.stats().prompt_tokens).result(LIMIT_S) == 89
        forged = wire.Ticket()
        forged.CopyFrom(admitted.ticket)
        forged.id = b"f" * 16
        other = await pair.hand_off(prompt(60))
        pair.start_prefill(other, prompt(60)[:-1], forged)
        failed = await pair.prefill.wait("failed", other)
        assert failed.failure.code == pb.INVALID_ARGUMENT
        await pair.decode.wait("finished", other)
        assert pair.prefill_role.core.num_stale == 1
        await old.close()
        await pair.at_rest()

    with_pair(test, engine=slow())


def test_last_messages_wait_for_a_session_that_missed_them(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        params = {"prompt_logprobs": 1, "logprobs": 0}
        attempt = pair.admit(prompt(30), remote=False, params=params)
        finished = await pair.decode.wait("finished", attempt)
        await pair.decode.close()
        client = another(pair)
        ask_again(client, attempt, [3])
        again = await client.wait("finished", attempt)
        assert client.kinds() == ["resumed", "prompt_logprobs", "tokens", "finished"]
        tokens = client.events[2][1]
        assert (tokens.position, list(tokens.ids)) == (3, expected(prompt(30))[0][3:])
        assert (len(tokens.logprobs), tokens.finish) == (5, pb.LENGTH)
        assert again.cached_tokens == finished.cached_tokens
        assert figures(pair).adopted == 1
        cancel = wire.CancelAttempt(attempt=attempt)
        client.send(wire.DecodeCommand(cancel=cancel))
        ask_again(client, attempt, epoch=EPOCH + 2)
        await client.wait("gone", attempt)
        await client.close()

    with_pair(test)


def test_ids_of_another_attempt_are_sent_without_scores_or_not_at_all(
    with_pair: Callable[..., None],
) -> None:
    async def test(pair: Pair) -> None:
        whole = expected(prompt(30))[0]
        given = [pb.ChoiceState(generated_ids=whole[:4])]
        for logprobs, kind in ((None, "resumed"), (0, "gone")):
            params = {} if logprobs is None else {"logprobs": logprobs}
            attempt = pair.admit(prompt(30), remote=False, choices=given, params=params)
            await pair.decode.wait("finished", attempt)
            ask_again(pair.decode, attempt, [2])
            await pair.decode.wait(kind, attempt)
        said = [m for k, m in pair.decode.events if k == "tokens" and m.position == 2]
        assert [list(m.ids) for m in said] == [whole[2:]]

    with_pair(test)


def test_a_request_that_no_session_adopts_expires(
    with_pair: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.services.decode.lease_machine.PARK_S", 0.2)

    async def test(pair: Pair) -> None:
        promised = pair.admit(prompt(50))
        await pair.decode.wait("admitted", promised)
        running = pair.admit(prompt(9), remote=False, params={"max_tokens": 200})
        await pair.decode.wait("tokens", running)
        await lose(pair)
        assert pair.decode_role.core.num_served == 2
        await eventually(lambda: pair.decode_role.core.num_served == 0)
        await pair.at_rest()
        assert figures(pair) == LeaseFigures(expired=2)
        assert (await load(pair)).park_expired == 2
        client = another(pair)
        for attempt in (promised, running):
            ask_again(client, attempt)
            await client.wait("gone", attempt)
        await client.close()

    with_pair(test, engine=slow())


def test_parked_blocks_go_to_requests_that_need_them(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        attempt = pair.admit(prompt(60), remote=False, params={"max_tokens": 60})
        await pair.decode.wait("tokens", attempt)
        await lose(pair)
        pair.decode = another(pair)
        other = await pair.hand_off(prompt(100, 1))
        assert (await pair.decode.wait("finished", other)).remote
        assert figures(pair) == LeaseFigures(evicted=1)
        assert (await load(pair)).park_evicted == 1
        ask_again(pair.decode, attempt)
        await pair.decode.wait("gone", attempt)
        await pair.at_rest()

    with_pair(test, engine=slow() | {"num_blocks": 34})


def test_the_highest_epoch_owns_the_request_and_the_old_session_is_ignored(
    with_pair: Callable[..., None],
) -> None:
    async def test(pair: Pair) -> None:
        attempt = pair.admit(prompt(20), remote=False, params={"max_tokens": 100})
        await pair.decode.wait("tokens", attempt)
        client = another(pair)
        ask_again(client, attempt, epoch=EPOCH)
        await eventually(lambda: figures(pair).stale == 1)
        assert not client.events, "an equal epoch gets no answer"
        ask_again(client, attempt, epoch=EPOCH + 4)
        await client.wait("resumed", attempt)
        cancel = wire.DecodeCommand(cancel=wire.CancelAttempt(attempt=attempt))
        pair.decode.send(cancel)
        await eventually(lambda: pair.decode_role.core.num_stale == 1)
        await pair.decode.close()
        await client.wait("finished", attempt)
        assert client.tokens(attempt) == expected(prompt(20), max_tokens=100)
        assert figures(pair) == LeaseFigures(stale=1), "taken over, not adopted; never parked"
        await client.close()

    with_pair(test, engine=slow())


@contextmanager
def busy_engine(pair: Pair) -> Iterator[None]:
    """Keep the engine's thread in one step for the duration of the context."""
    part: Any = pair.decode_worker.runtime
    done = threading.Event()
    part.thread.post(lambda _: done.wait(LIMIT_S))
    try:
        yield
    finally:
        done.set()


def test_a_resume_waits_until_the_engine_has_answered(
    with_pair: Callable[..., None],
) -> None:
    """Of two waiting sessions only the last is answered; one whose session is lost is not."""

    async def test(pair: Pair) -> None:
        clients = [another(pair) for _ in range(3)]
        with busy_engine(pair):
            attempt = pair.admit(prompt(20), remote=False)
            await eventually(lambda: pair.decode_role.core.num_served == 1)
            await pair.decode.close()
            await eventually(lambda: figures(pair).parked == 1)
            ask_again(clients[0], attempt, epoch=EPOCH + 1)
            await eventually(lambda: served_by(pair, attempt).resume is not None)
            ask_again(clients[1], attempt, epoch=EPOCH + 2)
            await clients[0].wait("gone", attempt)
            await clients[1].close()
            await eventually(lambda: served_by(pair, attempt).resume is None)
            ask_again(clients[2], attempt, epoch=EPOCH + 3)
            await eventually(lambda: served_by(pair, attempt).resume is not None)
            assert not clients[2].events
        resumed = await clients[2].wait("resumed", attempt)
        assert resumed.epoch == EPOCH + 3
        await clients[2].wait("finished", attempt)
        assert clients[2].tokens(attempt) == expected(prompt(20), max_tokens=8)
        assert (await engine_stats(pair)).prompt_tokens == 20
        for client in clients[::2]:
            await client.close()

    with_pair(test)


def test_a_resume_of_a_request_that_the_engine_refuses_is_answered(
    with_pair: Callable[..., None],
) -> None:
    async def test(pair: Pair) -> None:
        client = another(pair)
        with busy_engine(pair):
            attempt = pair.admit(prompt(20), remote=False, params={"max_tokens": 10**6})
            await eventually(lambda: pair.decode_role.core.num_served == 1)
            await pair.decode.close()
            await eventually(lambda: figures(pair).parked == 1)
            ask_again(client, attempt)
            await eventually(lambda: served_by(pair, attempt).resume is not None)
        await client.wait("gone", attempt)
        assert client.kinds() == ["gone"]
        await eventually(lambda: pair.decode_role.core.num_served == 0)
        await client.close()

    with_pair(test)


def test_a_deadline_passes_while_a_request_is_parked(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        attempt = pair.admit(prompt(20), remote=False, params={"max_tokens": 200}, remaining_ms=400)
        await pair.decode.wait("tokens", attempt)
        await lose(pair)
        await eventually(lambda: pair.decode_role.core.num_served == 0)
        await pair.at_rest()
        client = another(pair)
        ask_again(client, attempt)
        failed = await client.wait("failed", attempt)
        assert failed.failure.code == pb.DEADLINE_EXCEEDED
        assert client.kinds()[0] == "resumed"
        await client.close()

    with_pair(test, engine=slow())


@pytest.mark.parametrize("choices", [[], [1]])
def test_a_parked_request_is_cancelled(with_pair: Callable[..., None], choices: list[int]) -> None:
    async def test(pair: Pair) -> None:
        attempt = pair.admit(prompt(20), remote=False, params=SAMPLED, seed=7)
        await pair.decode.wait("tokens", attempt)
        await lose(pair)
        client = another(pair)
        cancel = wire.CancelAttempt(attempt=attempt, choices=choices)
        client.send(wire.DecodeCommand(cancel=cancel))
        if choices:
            ask_again(client, attempt)
            await client.wait("finished", attempt)
            whole = expected(prompt(20), seed=7, **SAMPLED)
            found = heard(client, attempt)
            assert [found[0][at][0] for at in range(100)] == whole[0]
            assert 0 < len(found[1]) < 100
        else:
            await pair.at_rest()
            ask_again(client, attempt)
            await client.wait("gone", attempt)
        await client.close()
        await pair.at_rest()

    with_pair(test, engine=slow())
