"""Hand-offs cancelled, late, corrupt or cut off: each ends once and returns its blocks."""

import socket
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.engine_kit import fake_engine
from fakes.device import array_at
from systems.eventually import LIMIT_S
from systems.handoff_pair import MakePair, Pair, fresh, local, promise_anything, prompt, request

from pdserve.engine.api import PrefillComputed
from pdserve.engine.handoff.connection import DataLink
from pdserve.engine.handoff.connection.connect import MAX_UNPROVEN
from pdserve.engine.handoff.device_frames import DeviceFrames, ReceivedFrame
from pdserve.engine.handoff.protocol import Domain, FrameHeader, TagKey
from pdserve.engine.handoff.receiver import Receiver
from pdserve.engine.kv import KvIdentity
from pdserve.engine.transport.base import transports

TRANSPORTS = list(transports())


def test_a_cancel_before_the_claim_is_answered_gone(pair: Pair) -> None:
    job = request(50)
    ticket = pair.admit(job)
    assert ticket is not None
    assert pair.at_decode(lambda r: r.cancel(ticket.attempt, "cancel"))
    pair.start(job, ticket)
    pair.wait(lambda: ticket.attempt in pair.sent)
    assert pair.sent[ticket.attempt].reason == "decode does not know the attempt"
    assert pair.lost == {ticket.attempt: "cancel"}
    pair.assert_clean()


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("chunk", [1, 5, 12])
def test_abort_at_each_phase(pair: Pair, side: str, chunk: int) -> None:
    job, hits = request(200), []

    def hook(step: Any) -> None:
        chunks = sum(isinstance(e, PrefillComputed) for e in step.events)
        hits.extend([step.index] * chunks)
        if chunks and len(hits) == chunk:
            if side == "prefill":
                pair.sender.cancel(attempt, "cancel")
            else:
                pair.decode_thread.post(lambda _: pair.receiver.cancel(attempt, "cancel"))

    pair.prefill_hook = hook
    attempt = bytes.fromhex(job.key)
    pair.hand_off(job)
    pair.wait(lambda: attempt in pair.sent and (attempt in pair.lost or attempt in pair.received))
    assert len(hits) >= chunk
    if side == "prefill":
        assert pair.sent[attempt].reason == "cancel"
        assert pair.lost[attempt] == "peer: cancel"
    elif attempt in pair.lost:
        assert pair.lost[attempt] == "cancel"
        assert pair.sent[attempt].reason in ("peer: cancel", "decode does not know the attempt")
    if attempt in pair.received:
        pair.answer(job)
    pair.assert_clean()


def test_prefill_killed_between_the_first_and_the_last_frame(pair: Pair) -> None:
    job = request(200)
    killed: list[int] = []

    def hook(step: Any) -> None:
        for link in pair.sender.links:
            frames = sum(f.frames for f in pair.receiver.figures.values())
            if not killed and frames >= 1:
                killed.append(frames)
                link.end("killed")

    pair.prefill_hook = hook
    slow_frames(pair)
    attempt = pair.hand_off(job)
    pair.wait(lambda: attempt in pair.lost)
    assert 1 <= killed[0] < 13, "between the first and the last frame"
    assert pair.lost[attempt].startswith("connection: ")
    pair.wait(lambda: attempt in pair.sent)
    assert pair.sent[attempt].reason.startswith("connection: ")
    pair.assert_clean()
    again = fresh(job)
    pair.hand_off(again)
    assert pair.answer(again) == local(job), "a new attempt on a new connection"


def slow_frames(pair: Pair) -> None:
    """Let prefill take a chunk only when decode has written the frames of the previous one."""
    inner, step_s = pair.prefill_hook, 0.02

    def hook(step: Any) -> None:
        threading.Event().wait(step_s)
        inner(step)

    pair.prefill_hook = hook


def corrupt(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Flip a bit of the payload of the first `times` frames before decode checks them."""
    hits: list[int] = []
    original = Receiver.payload

    def payload(receiver: Receiver, link: DataLink, header: FrameHeader, data: Any) -> None:
        if len(hits) < times:
            hits.append(header.sequence)
            if isinstance(data, memoryview):
                data = memoryview(bytearray(data))  # a slot of shm cannot be written here
                data[0] ^= 1
            else:
                array_at(data.slot.address, 1)[0] ^= 1
        original(receiver, link, header, data)

    monkeypatch.setattr(Receiver, "payload", payload)
    return hits


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_corrupt_frame_is_resent(
    transport: str, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits = corrupt(monkeypatch, 2)  # even if it is twice the same frame
    pair = make_pair(transport)
    job = request(200)
    attempt = pair.hand_off(job)
    assert pair.answer(job) == local(job)
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
    assert pair.sent[attempt].reason == "decode refused a frame 3 times"
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
    assert pair.lost[attempt] == "connection: a frame header has a wrong tag"
    assert pair.receiver.counters["refused"] == 1
    pair.assert_clean()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"decode_identity": KvIdentity(b"other weights")}, "KV identity"),
        ({"block_size": 8}, "block size 8 at decode, 4 at prefill"),
        ({"window": 10}, "2 layer groups at decode, 1 at prefill"),
    ],
)
def test_other_models_are_refused_and_named(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    identity = {k: change[k] for k in change if k == "decode_identity"}
    geometry = {k: change[k] for k in change if k != "decode_identity"}
    pair = Pair(fake_engine(), fake_engine(**geometry), "tcp", tmp_path, **identity)
    job = request(50)
    attempt = pair.hand_off(job)
    pair.wait(lambda: attempt in pair.sent)
    assert named in pair.sent[attempt].reason
    pair.at_decode(lambda r: r.cancel(attempt, "the router heard of it"))
    pair.assert_clean()
    pair.close()


def test_a_deadline_ends_both_sides(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(num_blocks=64, decode={"num_blocks": 40})
    blocker = pair.decode_thread.post(lambda e: e.reserve(request(150))).result(LIMIT_S)
    job = request(60)
    promise_anything(monkeypatch)
    ticket = pair.admit(job, time.monotonic() + 0.3)
    assert ticket is not None
    pair.start(job, ticket)
    pair.wait(lambda: ticket.attempt in pair.lost and ticket.attempt in pair.sent)
    assert pair.lost[ticket.attempt] == "deadline"
    assert pair.sent[ticket.attempt].reason == "peer: deadline"
    pair.decode_thread.post(lambda e: e.release(blocker)).result(LIMIT_S)
    pair.assert_clean()


def test_a_silent_peer_ends_the_attempt(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.engine.handoff.protocol.machine.SILENCE_S", 0.3)
    pair = make_pair(num_blocks=64, decode={"num_blocks": 40})
    blocker = pair.decode_thread.post(lambda e: e.reserve(request(150))).result(LIMIT_S)
    promise_anything(monkeypatch)
    pair.sender._stop_ticker()  # prefill lives, but sends nothing while its claim waits
    attempt = pair.hand_off(request(60))
    pair.wait(lambda: attempt in pair.lost)
    assert pair.lost[attempt] == "peer silent"
    pair.wait(lambda: attempt in pair.sent)
    pair.decode_thread.post(lambda e: e.release(blocker)).result(LIMIT_S)
    pair.assert_clean()


def test_frames_that_arrive_after_their_attempt_has_ended_change_no_block(pair: Pair) -> None:
    job = request(200)
    ticket = pair.admit(job)
    assert ticket is not None
    before = [data.copy() for data in pair.decode.kv.data]
    arrived, ended = threading.Event(), threading.Event()
    payload = pair.receiver.payload

    def held(*args: Any) -> None:
        """Block on the thread of the connection, before it checks the frame."""
        arrived.set()
        assert ended.wait(LIMIT_S)
        payload(*args)

    pair.receiver.payload = held  # type: ignore[method-assign]
    pair.start(job, ticket)
    assert arrived.wait(LIMIT_S)
    pair.at_decode(lambda r: r.cancel(ticket.attempt, "cancel"))
    ended.set()
    pair.wait(lambda: ticket.attempt in pair.sent)
    pair.wait(lambda: pair.receiver.counters["late_frames"] > 0)
    for old, new in zip(before, pair.decode.kv.data, strict=True):
        assert np.array_equal(old, new)
    pair.assert_clean()


def test_frames_wait_on_a_device_when_their_attempt_ends(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(transport="cuda_ipc")
    job = request(200)
    ticket = pair.admit(job)
    assert ticket is not None
    before = [data.copy() for data in pair.decode.kv.data]
    begun = threading.Event()
    arrived, poll = DeviceFrames.arrived, DeviceFrames.poll
    waiting_frames: list[ReceivedFrame] = []

    def arrives(frames: DeviceFrames, frame: ReceivedFrame) -> None:
        waiting_frames.append(frame)
        arrived(frames, frame)

    monkeypatch.setattr(DeviceFrames, "arrived", arrives)
    monkeypatch.setattr(DeviceFrames, "poll", lambda frames: begun.is_set() and poll(frames))
    pair.start(job, ticket)
    pair.wait(lambda: len(waiting_frames) > 0)

    def cancel(receiver: Receiver) -> int:
        receiver.cancel(ticket.attempt, "cancel")
        return len(waiting_frames)

    waiting = pair.at_decode(cancel)
    begun.set()
    pair.wait(lambda: ticket.attempt in pair.sent)
    pair.wait(lambda: pair.receiver.counters["late_frames"] >= waiting > 0)
    for old, new in zip(before, pair.decode.kv.data, strict=True):
        assert np.array_equal(old, new)
    pair.assert_clean()


def test_unauthenticated_connections_are_few_cost_no_window_and_block_no_peer(
    make_pair: MakePair,
) -> None:
    pair = make_pair()
    host, port = pair.addresses["tcp"].rsplit(":", 1)
    strangers = [socket.create_connection((host, int(port))) for _ in range(MAX_UNPROVEN + 4)]
    pair.wait(lambda: pair.receiver.counters["unproven_refused"] == 4)
    links = [link for link in pair.receiver.links if link.open]
    assert len(links) == MAX_UNPROVEN
    assert not any(link._wire._payload_buffer for link in links)
    job = request(50)
    pair.hand_off(job)
    assert pair.answer(job) == local(job), "the oldest unauthenticated connection is closed"
    assert pair.receiver.counters["unproven_refused"] == 5
    for one in strangers:
        one.close()
    pair.assert_clean()


def test_many_connections_of_one_address_cost_others_nothing(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair()
    host, port = pair.addresses["tcp"].rsplit(":", 1)

    def connect(source: str) -> socket.socket:
        return socket.create_connection((host, int(port)), source_address=(source, 0))

    other = connect("127.0.0.2")
    crowd = [connect("127.0.0.3") for _ in range(MAX_UNPROVEN + 9)]
    pair.wait(lambda: pair.receiver.counters["unproven_refused"] == 10)
    hosts = Counter(link.host for link in pair.receiver.links if link.open)
    assert hosts == {"127.0.0.2": 1, "127.0.0.3": MAX_UNPROVEN - 1}
    job = request(50)
    pair.hand_off(job)
    assert pair.answer(job) == local(job)
    for one in (other, *crowd):
        one.close()


def test_no_listener_at_the_address(make_pair: MakePair) -> None:
    pair = make_pair()
    job = request(50)
    ticket = pair.admit(job)
    assert ticket is not None
    pair.addresses["tcp"] = "127.0.0.1:9"
    pair.start(job, ticket)
    pair.wait(lambda: ticket.attempt in pair.sent)
    assert pair.sent[ticket.attempt].reason.startswith("cannot reach decode: tcp: 127.0.0.1:9")
    pair.at_decode(lambda r: r.cancel(ticket.attempt, "the router heard of it"))
    pair.assert_clean()


def test_ids_of_another_length_are_refused(make_pair: MakePair) -> None:
    pair = make_pair()
    job = request(50)
    ticket = pair.admit(job)
    assert ticket is not None
    pair.start(job, ticket, prompt(30))
    pair.wait(lambda: ticket.attempt in pair.lost and ticket.attempt in pair.sent)
    assert pair.lost[ticket.attempt] == "the Claim names 30 tokens instead of 49"
    pair.assert_clean()
