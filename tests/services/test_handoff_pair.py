"""Sender and Receiver over every transport: tokens as if prefilled locally, nothing left behind."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_kit import ask, assert_at_rest, fake_engine, run, tokens
from fake_decoder import FakeDecoder, fake_spec
from handoff_pair import Pair, fresh

from pdserve.engine.handoff.frames import FrameHeader
from pdserve.engine.handoff.keys import Domain, TagKey
from pdserve.engine.handoff.machine import Action, Phase
from pdserve.engine.handoff.promise import Promises
from pdserve.engine.handoff.receiver import MAX_STRANGERS, Receiver
from pdserve.engine.request import ChoiceState, Computed, Request
from pdserve.engine.transport.link import Link
from pdserve.engine.transport.registry import transports

TRANSPORTS = list(transports())


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(i * 7 + seed * 13 + i * i) % 60 for i in range(length)]


def request(length: int, seed: int = 0, **params: Any) -> Request:
    return fresh(ask("", prompt(length, seed), **params))


def local(asked: Request, **engine: Any) -> dict[int, list[int]]:
    """What one engine alone answers."""
    found = tokens(run(fake_engine(**engine), asked))
    return {choice: ids for (_, choice), ids in found.items()}


MakePair = Callable[..., Pair]


def promise_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there had been room when it was admitted."""

    def offer(promises: Promises, blocks: int, available: int, running: int) -> bool:
        promises.blocks += blocks
        return True

    monkeypatch.setattr(Promises, "offer", offer)


@pytest.fixture
def make_pair(tmp_path: Path) -> Iterator[MakePair]:
    made: list[Pair] = []

    def make(transport: str = "tcp", decode: dict[str, Any] | None = None, **engine: Any) -> Pair:
        engine = {"num_blocks": 256} | engine
        prefill = fake_engine(**engine)
        pair = Pair(prefill, fake_engine(**(engine | (decode or {}))), transport, tmp_path)
        made.append(pair)
        return pair

    yield make
    before = threading.active_count()
    for pair in made:
        pair.close()
        assert_at_rest(pair.prefill)
        assert_at_rest(pair.decode)
    assert threading.active_count() < before or not made
    assert not list(tmp_path.iterdir()), "a socket was left"


@pytest.fixture(params=TRANSPORTS)
def pair(request: pytest.FixtureRequest, make_pair: MakePair) -> Pair:
    return make_pair(request.param)


# prompts around a block (4 tokens) and a chunk (16): the transfer has one token less
@pytest.mark.parametrize("length", [2, 3, 4, 5, 6, 8, 9, 16, 17, 18, 33, 200])
def test_same_tokens_as_local(pair: Pair, length: int) -> None:
    asked = request(length)
    attempt = pair.hand_off(asked)
    assert pair.answer(asked) == local(asked)
    pair.wait(lambda: attempt in pair.sent)
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

    class Slow(FakeDecoder):
        def forward(self, batch: Any, kv: Any) -> Any:
            waited.append(granted.wait(5))
            return super().forward(batch, kv)

    pair = make_pair()
    pair.prefill._runner._model = Slow(fake_spec())
    reserve = pair.decode.reserve

    def noted(asked: Request) -> Any:
        reservation = reserve(asked)
        granted.set()
        return reservation

    pair.decode.reserve = noted  # type: ignore[method-assign]
    asked = request(9)
    pair.hand_off(asked)
    assert pair.answer(asked) == local(asked)
    assert waited == [True]
    pair.assert_clean()


DECODE_ACTIONS = [Action.SEND_GRANTED, Action.COMMIT]
PREFILL_ACTIONS = [Action.SEND_CLAIM, Action.SEND_FRAMES]


@pytest.mark.parametrize("action", [*DECODE_ACTIONS, *PREFILL_ACTIONS], ids=lambda a: a.value)
def test_an_action_that_raises_ends_its_attempt_only(
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
    asked = request(90)
    attempt = pair.hand_off(asked)
    assert pair.answer(asked) == local(asked, window=10)
    full, window = -(-89 // 4), -(-89 // 4) - (89 - 10 + 1) // 4
    assert pair.received[attempt].num_bytes == (full + window) * 128
    pair.assert_clean()


def test_many_at_once_reuse_one_connection(pair: Pair) -> None:
    asked = [request(20 + 9 * i, seed=i) for i in range(8)]
    for one in asked:
        pair.hand_off(one)
    for one in asked:
        assert pair.answer(one) == local(one)
    assert len(pair.sender._links) == len(pair.receiver._links) == 1
    pair.assert_clean()


def test_a_warm_prefix_at_decode_is_not_sent_again(pair: Pair) -> None:
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
    asked = request(50, n=3, temperature=1.0, seed=9)
    pair.hand_off(asked)
    whole = pair.answer(asked)
    assert whole == local(asked)
    one = request(50, temperature=1.0, seed=9)
    expected = local(one)[0]
    resumed = fresh(
        ask("", one.prompt_ids, choices=(ChoiceState(tuple(expected[:3])),), temperature=1.0)
    )
    pair.hand_off(Request(resumed.key, one.prompt_ids, one.params, one.seed, resumed.choices))
    assert pair.answer(resumed)[0] == expected[3:]
    pair.assert_clean()


def test_cancelled_choices_do_not_join_the_batch(pair: Pair) -> None:
    asked = request(50, n=3, temperature=1.0)
    ticket = pair.admit(asked)
    assert ticket is not None
    assert pair.at_decode(lambda r: r.cancel_choices(ticket.attempt, [1]))
    pair.start(asked, ticket)
    answer = pair.answer(asked)
    assert answer[1] == []
    assert (answer[0], answer[2]) == (local(asked)[0], local(asked)[2])
    pair.assert_clean()


def test_a_claim_waits_for_blocks_and_then_goes_on(make_pair: MakePair) -> None:
    pair = make_pair(num_blocks=64, decode={"num_blocks": 40, "prefix_cache": False})
    hog = request(100, seed=1, max_tokens=50)  # 38 of 40 blocks by its end
    asked = request(60, seed=2)
    ticket = pair.admit(asked)  # promised while there was room
    assert ticket is not None
    pair.decode_thread.post(lambda engine: engine.submit(hog)).result(10)
    pair.wait(lambda: hog.key in pair.tokens)
    pair.start(asked, ticket)
    waited = []
    pair.wait(lambda: waited.append(len(pair.receiver._claims)) or ticket.attempt in pair.received)
    assert pair.received[ticket.attempt].times.granted > 0
    assert pair.answer(asked) == local(asked)
    assert pair.answer(hog) == local(hog)
    pair.assert_clean()


def test_a_waiting_claim_keeps_fifo_order(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(num_blocks=64, decode={"num_blocks": 40, "prefix_cache": False})
    blocker = pair.decode_thread.post(lambda e: e.reserve(request(120))).result(10)
    assert blocker is not None
    large, small = request(100, seed=1), request(9, seed=2)
    promise_anything(monkeypatch)
    tickets = [pair.admit(large), pair.admit(small)]
    for one, ticket in zip((large, small), tickets, strict=True):
        assert ticket is not None
        pair.start(one, ticket)
        pair.wait(lambda t=ticket: pair.receiver._by_attempt[t.attempt].state.linked)
    assert [a.state.phase for a in pair.receiver._claims] == [Phase.CLAIMED] * 2
    assert not pair.received, "the small one fits, but the head is first"
    pair.decode_thread.post(lambda e: e.release(blocker)).result(10)
    pair.receiver._wake()
    for one in (large, small):
        assert pair.answer(one) == local(one)
    times = [pair.received[t.attempt].times.granted for t in tickets if t is not None]
    assert times == sorted(times)
    pair.assert_clean()


def test_busy_beyond_the_promises(make_pair: MakePair) -> None:
    pair = make_pair(num_blocks=64)
    tickets = [pair.admit(request(60, seed=i)) for i in range(6)]
    given = [t for t in tickets if t is not None]
    assert len(given) == 4, "16 blocks each of 64"
    assert pair.at_decode(lambda r: r.promised_tokens) == 256
    for ticket in given:
        assert pair.at_decode(lambda r, t=ticket: r.cancel(t.attempt, "cancel"))
    assert pair.admit(request(60)) is not None
    pair.at_decode(lambda r: [r.cancel(a, "cancel") for a in list(r._by_attempt)])
    pair.assert_clean()


def test_cancel_before_the_claim_is_answered_gone(pair: Pair) -> None:
    asked = request(50)
    ticket = pair.admit(asked)
    assert ticket is not None
    assert pair.at_decode(lambda r: r.cancel(ticket.attempt, "cancel"))
    pair.start(asked, ticket)
    pair.wait(lambda: ticket.attempt in pair.sent)
    assert pair.sent[ticket.attempt].reason == "gone at decode"
    assert pair.lost == {ticket.attempt: "cancel"}
    pair.assert_clean()


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("chunk", [1, 5, 12])
def test_abort_at_each_phase(pair: Pair, side: str, chunk: int) -> None:
    asked, hits = request(200), []

    def hook(step: Any) -> None:
        chunks = sum(isinstance(e, Computed) for e in step.events)
        hits.extend([step.index] * chunks)
        if chunks and len(hits) == chunk:
            if side == "prefill":
                pair.sender.cancel(attempt, "cancel")
            else:
                pair.decode_thread.post(lambda _: pair.receiver.cancel(attempt, "cancel"))

    pair.prefill_hook = hook
    attempt = bytes.fromhex(asked.key)
    pair.hand_off(asked)
    pair.wait(lambda: attempt in pair.sent and (attempt in pair.lost or attempt in pair.received))
    assert len(hits) >= chunk
    if side == "prefill":
        assert pair.sent[attempt].reason == "cancel"
        assert pair.lost[attempt] == "peer: cancel"
    elif attempt in pair.lost:
        assert pair.lost[attempt] == "cancel"
        assert pair.sent[attempt].reason in ("peer: cancel", "gone at decode")
    if attempt in pair.received:
        pair.answer(asked)
    pair.assert_clean()


def test_prefill_killed_between_the_first_and_the_last_frame(pair: Pair) -> None:
    asked = request(200)
    killed: list[int] = []

    def hook(step: Any) -> None:
        for link in list(pair.receiver._links):
            frames = sum(f.frames for f in pair.receiver.figures.values())
            if not killed and frames >= 1:
                killed.append(frames)
                link._wire.interrupt()

    pair.prefill_hook = hook
    slow_frames(pair)
    attempt = pair.hand_off(asked)
    pair.wait(lambda: attempt in pair.lost)
    assert 1 <= killed[0] < 13, "between the first and the last frame"
    assert pair.lost[attempt].startswith("connection: ")
    pair.wait(lambda: attempt in pair.sent)
    assert pair.sent[attempt].reason.startswith("connection: ")
    pair.assert_clean()
    again = fresh(asked)
    pair.hand_off(again)
    assert pair.answer(again) == local(asked), "a new attempt on a new connection"


def slow_frames(pair: Pair) -> None:
    """Prefill takes a chunk only when decode has written the frames of the one before."""
    inner, step_s = pair.prefill_hook, 0.02

    def hook(step: Any) -> None:
        threading.Event().wait(step_s)
        inner(step)

    pair.prefill_hook = hook


def corrupt(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Flip a bit of the payload of the first `times` frames before decode checks them."""
    hits: list[int] = []
    original = Receiver.payload

    def payload(receiver: Receiver, link: Link, header: FrameHeader, data: memoryview) -> None:
        if len(hits) < times:
            hits.append(header.sequence)
            data[0] ^= 1
        original(receiver, link, header, data)

    monkeypatch.setattr(Receiver, "payload", payload)
    return hits


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_corrupt_frame_is_sent_again(
    transport: str, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits = corrupt(monkeypatch, 2)  # even if it is twice the same frame
    pair = make_pair(transport)
    asked = request(200)
    attempt = pair.hand_off(asked)
    assert pair.answer(asked) == local(asked)
    assert len(hits) == 2
    assert pair.receiver.counters["corrupt_frames"] == 2
    pair.wait(lambda: attempt in pair.sent)
    assert pair.sender.counters["resent"] == 2
    assert pair.sent[attempt].num_bytes > pair.received[attempt].num_bytes
    pair.assert_clean()


def test_a_frame_refused_three_times_fails_the_attempt(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    corrupt(monkeypatch, 1000)
    pair = make_pair()
    attempt = pair.hand_off(request(200))
    pair.wait(lambda: attempt in pair.sent and attempt in pair.lost)
    assert pair.sent[attempt].reason == "a frame was refused 3 times"
    assert not pair.received
    pair.assert_clean()


def test_a_frame_header_signed_with_another_key_is_refused(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, forged = TagKey.tag, TagKey(bytes(32))
    hits: list[int] = []

    def tag(key: TagKey, domain: Domain, sequence: int, data: Any) -> bytes:
        if domain is Domain.HEADER and threading.current_thread().name.endswith("-write"):
            hits.append(sequence)
            return real(forged, domain, sequence, data)
        return real(key, domain, sequence, data)

    monkeypatch.setattr(TagKey, "tag", tag)
    pair = make_pair()
    attempt = pair.hand_off(request(50))
    pair.wait(lambda: attempt in pair.sent and attempt in pair.lost)
    assert hits
    assert pair.lost[attempt] == "connection: frame header with a bad tag"
    assert pair.receiver.counters["refused"] == 1
    pair.assert_clean()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"decode_identity": b"other weights"}, "KV identity"),
        ({"block_size": 8}, "block size 8 here, 4 there"),
        ({"window": 10}, "2 layer groups here, 1 there"),
    ],
)
def test_other_models_are_refused_and_named(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    identity = {k: change[k] for k in change if k == "decode_identity"}
    geometry = {k: change[k] for k in change if k != "decode_identity"}
    pair = Pair(fake_engine(), fake_engine(**geometry), "tcp", tmp_path, **identity)
    asked = request(50)
    attempt = pair.hand_off(asked)
    pair.wait(lambda: attempt in pair.sent)
    assert named in pair.sent[attempt].reason
    pair.at_decode(lambda r: r.cancel(attempt, "the router heard of it"))
    pair.assert_clean()
    pair.close()


def test_a_deadline_ends_both_sides(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(num_blocks=64, decode={"num_blocks": 40})
    blocker = pair.decode_thread.post(lambda e: e.reserve(request(150))).result(10)
    asked = request(60)
    promise_anything(monkeypatch)
    ticket = pair.admit(asked, pair.receiver._clock() + 0.3)
    assert ticket is not None
    pair.start(asked, ticket)
    pair.wait(lambda: ticket.attempt in pair.lost and ticket.attempt in pair.sent)
    assert pair.lost[ticket.attempt] == "deadline"
    assert pair.sent[ticket.attempt].reason == "peer: deadline"
    pair.decode_thread.post(lambda e: e.release(blocker)).result(10)
    pair.assert_clean()


def test_a_silent_peer_ends_the_attempt(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.engine.handoff.machine.SILENCE_S", 0.3)
    pair = make_pair(num_blocks=64, decode={"num_blocks": 40})
    blocker = pair.decode_thread.post(lambda e: e.reserve(request(150))).result(10)
    promise_anything(monkeypatch)
    pair.sender._stop_ticker()  # prefill lives, but says nothing while its claim waits
    attempt = pair.hand_off(request(60))
    pair.wait(lambda: attempt in pair.lost)
    assert pair.lost[attempt] == "peer silent"
    pair.wait(lambda: attempt in pair.sent)
    pair.decode_thread.post(lambda e: e.release(blocker)).result(10)
    pair.assert_clean()


def test_frames_that_wait_when_their_attempt_ends_change_no_block(pair: Pair) -> None:
    asked = request(200)
    ticket = pair.admit(asked)
    assert ticket is not None
    before = [data.clone() for data in pair.decode.kv.data]
    pair.start(asked, ticket)

    def hold_then_cancel(receiver: Receiver) -> int:
        """On decode's engine thread, with verified frames waiting for it."""
        while not receiver._by_attempt[ticket.attempt].state.holds:
            receiver.poll(0.0)  # no time for a frame
        end = time.monotonic() + 10
        while not receiver._parcels and time.monotonic() < end:
            time.sleep(0.005)
        receiver.cancel(ticket.attempt, "cancel")
        return len(receiver._parcels)

    waiting = pair.at_decode(hold_then_cancel)
    assert waiting > 0
    pair.wait(lambda: ticket.attempt in pair.sent)
    pair.wait(lambda: pair.receiver.counters["late_frames"] >= waiting)
    for old, new in zip(before, pair.decode.kv.data, strict=True):
        assert old.equal(new)
    pair.assert_clean()


def test_strangers_are_few_and_cost_no_window(make_pair: MakePair) -> None:
    pair = make_pair()
    host, port = pair.addresses["tcp"].rsplit(":", 1)
    strangers = [socket.create_connection((host, int(port))) for _ in range(MAX_STRANGERS + 4)]
    pair.wait(lambda: pair.receiver.counters["strangers_refused"] == 4)
    assert not any(link._private for link in pair.receiver._links)
    asked = request(50)
    attempt = pair.hand_off(asked)
    pair.wait(lambda: attempt in pair.sent)
    assert pair.sent[attempt].reason.startswith("cannot reach decode")
    for one in strangers:
        one.close()
    pair.at_decode(lambda r: r.cancel(attempt, "the router heard of it"))
    again = fresh(asked)
    pair.wait(lambda: not any(link.open for link in list(pair.receiver._links)))
    pair.hand_off(again)
    assert pair.answer(again) == local(asked), "their places are free again"
    pair.assert_clean()


def test_nobody_at_the_address(make_pair: MakePair) -> None:
    pair = make_pair()
    asked = request(50)
    ticket = pair.admit(asked)
    assert ticket is not None
    pair.addresses["tcp"] = "127.0.0.1:9"
    pair.start(asked, ticket)
    pair.wait(lambda: ticket.attempt in pair.sent)
    assert pair.sent[ticket.attempt].reason.startswith("cannot reach decode: tcp: 127.0.0.1:9")
    pair.at_decode(lambda r: r.cancel(ticket.attempt, "the router heard of it"))
    pair.assert_clean()


def test_ids_of_another_length_are_refused(make_pair: MakePair) -> None:
    pair = make_pair()
    asked = request(50)
    ticket = pair.admit(asked)
    assert ticket is not None
    pair.start(asked, ticket, prompt(30))
    pair.wait(lambda: ticket.attempt in pair.lost and ticket.attempt in pair.sent)
    assert pair.lost[ticket.attempt] == "claim of 30 tokens, not 49"
    pair.assert_clean()


def test_mixed_requests_leave_nothing(make_pair: MakePair) -> None:
    pair = make_pair("shm")
    pair.hand_off(request(9))
    pair.assert_clean()
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for batch in range(15):
        asked = [request(5 + (batch * 37 + i * 11) % 120, seed=i, max_tokens=4) for i in range(4)]
        attempts = [pair.hand_off(one) for one in asked]
        victim = attempts[batch % 4]
        if batch % 3 == 0:
            pair.at_decode(lambda r, v=victim: r.cancel(v, "cancel"))
        for one, attempt in zip(asked, attempts, strict=True):
            pair.wait(lambda a=attempt: a in pair.sent)
            if attempt not in pair.lost:
                assert pair.answer(one) == local(one)
    assert pair.lost, "some were cancelled"
    pair.assert_clean()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == fds
