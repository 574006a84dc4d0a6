"""Sender and Receiver over every transport: tokens as if prefilled locally, everything released."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from builders.engine_kit import ask
from systems.eventually import LIMIT_S
from systems.handoff_pair import MakePair, Pair, claims_of, fresh, local, promise_anything, request
from systems.open_files import open_files

from pdserve.engine.api import ChoiceState, PrefillComputed, Request, Step
from pdserve.engine.handoff.protocol import Action
from pdserve.engine.transport.base import transports

TRANSPORTS = list(transports())


# Prompt lengths around a block (4 tokens) and a chunk (16): the transfer has one token less.
LENGTHS = [2, 3, 4, 5, 6, 8, 9, 16, 17, 18, 33, 200]


def test_tokens_equal_those_of_a_local_prefill(pair: Pair, subtests: pytest.Subtests) -> None:
    for length in LENGTHS:
        with subtests.test(length=length):
            job = request(length, seed=length)  # no two share a block
            attempt = pair.hand_off(job)
            assert pair.answer(job) == local(job)
            pair.wait(lambda a=attempt: a in pair.sent)
            assert pair.sent[attempt].reason == ""
            received = pair.received[attempt]
            blocks = -(-(length - 1) // 4)
            assert received.num_bytes == pair.sent[attempt].num_bytes == blocks * 128
            assert received.transport == pair.sent[attempt].transport
            assert received.times.admitted <= received.times.claimed <= received.times.committed
            pair.assert_clean()


def test_the_claim_of_one_chunk_is_granted_while_it_is_computed(make_pair: MakePair) -> None:
    granted = threading.Event()
    waited: list[bool] = []

    pair = make_pair()
    forward, reserve = pair.prefill.model.forward, pair.decode.reserve

    def slow(batch: Any, kv: Any) -> Any:
        waited.append(granted.wait(LIMIT_S))
        return forward(batch, kv)

    def noted(job: Request, sender: bytes = b"") -> Any:
        reservation = reserve(job, sender)
        granted.set()
        return reservation

    pair.prefill.model.forward = slow  # type: ignore[method-assign]
    pair.decode.reserve = noted  # type: ignore[method-assign]
    job = request(9)
    pair.hand_off(job)
    assert pair.answer(job) == local(job)
    assert waited == [True]
    pair.assert_clean()


DECODE_ACTIONS = [Action.SEND_GRANTED, Action.COMMIT]


PREFILL_ACTIONS = [Action.SEND_CLAIM, Action.SEND_FRAMES]


@pytest.mark.parametrize("action", [*DECODE_ACTIONS, *PREFILL_ACTIONS], ids=lambda a: a.value)
def test_an_action_that_raises_ends_only_its_attempt(
    make_pair: MakePair, action: Action, caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_pair()
    at_decode = action in DECODE_ACTIONS
    end: Any = pair.receiver if at_decode else pair.sender
    act = end.actions[action]
    bugs = [RuntimeError("a bug")]

    def broken(attempt: Any) -> None:
        if bugs:
            raise bugs.pop()
        act(attempt)

    end.actions[action] = broken
    attempt = pair.hand_off(request(33))
    pair.wait(lambda: attempt in pair.sent)
    if at_decode:
        pair.wait(lambda: attempt in pair.lost)
        assert pair.lost[attempt] == "internal error"
    else:
        assert pair.sent[attempt].reason == "internal error"
        pair.at_decode(lambda r: r.cancel(attempt, "as the router would"))
    assert "a bug" in caplog.text
    pair.assert_clean()
    after = request(33, seed=1)
    pair.hand_off(after)
    assert pair.answer(after) == local(after)


def test_a_frame_that_cannot_be_written_ends_its_attempt(
    make_pair: MakePair, caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_pair()

    def write(*args: Any) -> None:
        raise RuntimeError("a bug")

    pair.decode.kv.write = write  # type: ignore[method-assign]
    attempt = pair.hand_off(request(33))
    pair.wait(lambda: attempt in pair.lost)
    assert pair.lost[attempt] == "internal error"
    assert "a bug" in caplog.text
    pair.wait(lambda: attempt in pair.sent)
    pair.assert_clean()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_windowed_groups_send_what_the_window_needs(transport: str, make_pair: MakePair) -> None:
    pair = make_pair(transport, window=10)
    job = request(90)
    attempt = pair.hand_off(job)
    assert pair.answer(job) == local(job, window=10)
    full, window = -(-89 // 4), -(-89 // 4) - (89 - 10 + 1) // 4
    assert pair.received[attempt].num_bytes == (full + window) * 128
    pair.assert_clean()


def test_many_concurrent_hand_offs_reuse_one_connection(pair: Pair) -> None:
    requests = [request(20 + 9 * i, seed=i) for i in range(8)]
    for one in requests:
        pair.hand_off(one)
    for one in requests:
        assert pair.answer(one) == local(one)
    assert len(pair.sender.links) == len(pair.receiver.links) == 1
    pair.assert_clean()


def test_a_warm_prefix_at_decode_is_not_sent(pair: Pair) -> None:
    first = request(100)
    pair.hand_off(first)
    pair.answer(first)
    second = fresh(first)
    attempt = pair.hand_off(second)
    assert pair.answer(second) == local(first)
    assert 0 < pair.received[attempt].cached_tokens <= 99
    assert pair.received[attempt].num_bytes < pair.received[bytes.fromhex(first.key)].num_bytes / 4
    pair.assert_clean()


def test_a_warm_prefix_at_prefill_is_sent_like_computed_blocks(make_pair: MakePair) -> None:
    pair = make_pair(decode={"prefix_cache": False})
    first = request(100)
    pair.hand_off(first)
    pair.answer(first)
    second = fresh(first)
    attempt = pair.hand_off(second)
    assert pair.answer(second) == local(first)
    pair.wait(lambda: attempt in pair.sent)
    assert pair.sent[attempt].cached_tokens >= 96
    assert pair.received[attempt].cached_tokens == pair.sent[attempt].cached_tokens
    assert pair.received[attempt].num_bytes == 25 * 128
    pair.assert_clean()


def test_choices_and_resumes(pair: Pair) -> None:
    job = request(50, n=3, temperature=1.0, seed=9)
    pair.hand_off(job)
    whole = pair.answer(job)
    assert whole == local(job)
    one = request(50, temperature=1.0, seed=9)
    expected = local(one)[0]
    resumed = fresh(
        ask("", one.prompt_ids, choices=(ChoiceState(tuple(expected[:3])),), temperature=1.0)
    )
    pair.hand_off(Request(resumed.key, one.prompt_ids, one.params, one.seed, resumed.choices))
    assert pair.answer(resumed)[0] == expected[3:]
    pair.assert_clean()


def test_cancelled_choices_do_not_join_the_batch(pair: Pair) -> None:
    job = request(50, n=3, temperature=1.0)
    ticket = pair.admit(job)
    assert ticket is not None
    assert pair.at_decode(lambda r: r.cancel_choices(ticket.attempt, [1]))
    pair.start(job, ticket)
    answer = pair.answer(job)
    assert answer[1] == []
    assert (answer[0], answer[2]) == (local(job)[0], local(job)[2])
    pair.assert_clean()


def test_a_claim_waits_for_blocks_and_then_continues(make_pair: MakePair) -> None:
    pair = make_pair(num_blocks=64, decode={"num_blocks": 40, "prefix_cache": False})
    hog = request(100, seed=1, max_tokens=50)  # 38 of 40 blocks by its end
    job = request(60, seed=2)
    ticket = pair.admit(job)  # promised while there was room
    assert ticket is not None
    pair.decode_thread.post(lambda engine: engine.submit(hog)).result(LIMIT_S)
    pair.wait(lambda: hog.key in pair.tokens)
    pair.start(job, ticket)
    waited = []
    pair.wait(
        lambda: waited.append(len(claims_of(pair.receiver))) or ticket.attempt in pair.received
    )
    assert pair.received[ticket.attempt].times.granted > 0
    assert pair.answer(job) == local(job)
    assert pair.answer(hog) == local(hog)
    pair.assert_clean()


def test_a_waiting_claim_keeps_fifo_order(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(num_blocks=64, decode={"num_blocks": 40, "prefix_cache": False})
    blocker = pair.decode_thread.post(lambda e: e.reserve(request(120))).result(LIMIT_S)
    assert blocker is not None
    large, small = request(100, seed=1), request(9, seed=2)
    promise_anything(monkeypatch)
    tickets = [pair.admit(large), pair.admit(small)]
    for one, ticket in zip((large, small), tickets, strict=True):
        assert ticket is not None
        pair.start(one, ticket)
        pair.wait(lambda t=ticket: pair.receiver.attempt(t.attempt).state.linked)
    assert [a.request.key for a in claims_of(pair.receiver)] == [large.key, small.key]
    assert not pair.received, "the small one fits, but the head is first"
    pair.decode_thread.post(lambda e: e.release(blocker)).result(LIMIT_S)
    pair.decode_thread.wake()
    for one in (large, small):
        assert pair.answer(one) == local(one)
    times = [pair.received[t.attempt].times.granted for t in tickets if t is not None]
    assert times == sorted(times)
    pair.assert_clean()


def test_requests_beyond_the_promised_blocks_are_refused(make_pair: MakePair) -> None:
    pair = make_pair(num_blocks=64)
    tickets = [pair.admit(request(60, seed=i)) for i in range(6)]
    given = [t for t in tickets if t is not None]
    assert len(given) == 4, "16 blocks each of 64"
    assert pair.at_decode(lambda r: r.promised_tokens) == 256
    for ticket in given:
        assert pair.at_decode(lambda r, t=ticket: r.cancel(t.attempt, "cancel"))
    assert pair.admit(request(60)) is not None
    pair.at_decode(lambda r: [r.cancel(a.ticket.attempt, "cancel") for a in r.live])
    pair.assert_clean()


def cancel_at_first_chunk(pair: Pair, key: str) -> Callable[[Step], None]:
    """Return a prefill hook that makes decode cancel before the second chunk is computed."""

    def hook(step: Step) -> None:
        if any(isinstance(event, PrefillComputed) and event.key == key for event in step.events):
            cancelled = pair.decode_thread.post(
                lambda _: pair.receiver.cancel(bytes.fromhex(key), "cancel")
            )
            cancelled.result(LIMIT_S)

    return hook


def test_mixed_requests_release_everything(make_pair: MakePair) -> None:
    pair = make_pair("shm")
    pair.hand_off(request(9))
    pair.assert_clean()
    threads, files = threading.active_count(), open_files()
    for batch in range(15):
        requests = [
            request(5 + (batch * 37 + i * 11) % 120, seed=i, max_tokens=4) for i in range(4)
        ]
        if batch % 3 == 0:  # the victim is long, and cancelled when its first chunk is computed
            victim = batch // 3 % 4
            requests[victim] = request(120, seed=batch, max_tokens=4)
            pair.prefill_hook = cancel_at_first_chunk(pair, requests[victim].key)
        attempts = [pair.hand_off(one) for one in requests]
        for one, attempt in zip(requests, attempts, strict=True):
            pair.wait(lambda a=attempt: a in pair.sent)
            if attempt not in pair.lost:
                assert pair.answer(one) == local(one)
    assert list(pair.lost.values()) == ["cancel"] * 5
    pair.assert_clean()
    assert threading.active_count() == threads
    assert open_files() - files == set()
