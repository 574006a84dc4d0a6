"""A flipped bit in a ticket's id: the tag identifies the record, and no attempt waits for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from systems.eventually import LIMIT_S
from systems.handoff_pair import DIRECT_TRANSPORTS, MakePair, Pair, claims_of, fresh, local, request

from pdserve.engine.handoff.connection import DataLink
from pdserve.engine.handoff.protocol import FRAME_TYPE, ID_BYTES, PREFIX_BYTES, messages
from pdserve.engine.transport import Frame, FrameJob
from pdserve.engine.transport.base import transports

CACHELESS: dict[str, Any] = {"prefix_cache": False}


def change(monkeypatch: pytest.MonkeyPatch, kind: int, bits: list[int]) -> list[int]:
    """Flip one bit of the id in each of the next records of a type; return the remaining bits."""
    left, post, push = list(bits), DataLink.post, DataLink.push

    def changed(record: bytes) -> bytes:
        if not left or record[3] != kind:
            return record
        bit, data = left.pop(0), bytearray(record)
        data[PREFIX_BYTES + bit // 8] ^= 1 << bit % 8
        return bytes(data)

    def pushed(link: DataLink, *jobs: FrameJob) -> None:
        @contextmanager
        def build(job: FrameJob, slot: int, sink: Any) -> Iterator[Frame | None]:
            with job(slot, sink) as frame:
                yield frame and Frame(changed(frame.record), frame.parts)

        push(link, *(partial(build, job) for job in jobs))

    monkeypatch.setattr(DataLink, "post", lambda link, record: post(link, changed(record)))
    monkeypatch.setattr(DataLink, "push", pushed)
    return left


def hand_over(pair: Pair, length: int, seed: int) -> None:
    one_request = request(length, seed=seed, max_tokens=3)
    attempt = pair.hand_off(one_request)
    assert pair.answer(one_request) == local(one_request, **CACHELESS)
    pair.wait(lambda: attempt in pair.sent)
    assert pair.sent[attempt].reason == ""


@pytest.mark.parametrize(
    ("transport", "encrypted"),
    [(n, sealed) for n in transports() for sealed in {False, n not in DIRECT_TRANSPORTS}],
)
@pytest.mark.parametrize("length", [9, 200], ids=["one frame", "many"])
def test_a_frame_is_requested_again(
    length: int,
    transport: str,
    encrypted: bool,
    make_pair: MakePair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = make_pair(transport, encrypted=encrypted, **CACHELESS)
    bits = [0, 70, 8 * ID_BYTES - 1]
    left = change(monkeypatch, FRAME_TYPE, [])
    for seed, bit in enumerate(bits):
        left.append(bit)
        hand_over(pair, length, seed)
        assert not left
    receiver, sender = pair.receiver.counters, pair.sender.counters
    assert receiver["misnamed"] == receiver["refused"] == sender["resent"] == len(bits)
    assert len(pair.sender.links) == 1, "the connection stays open"
    assert not pair.lost
    pair.assert_clean()


@pytest.mark.parametrize(
    "kind",
    [messages.Claim, messages.Computed, messages.Granted, messages.Ack, messages.Complete],
    ids=lambda kind: kind.__name__,
)
def test_a_message_with_a_damaged_id_is_identified(
    kind: type[messages.Body], make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair("tcp", **CACHELESS)
    hand_over(pair, 50, 0)  # decode knows the peer
    left = change(monkeypatch, kind.TYPE, [3, 90])
    for seed in range(1, 50):
        hand_over(pair, 50, seed)
        if seed >= 3 and not left:  # no Ack is sent of frames that all arrive in one turn
            break
    assert not left
    from_prefill = kind in (messages.Claim, messages.Computed)
    side = pair.receiver if from_prefill else pair.sender
    assert side.counters["misnamed"] == 2
    assert not pair.lost
    pair.assert_clean()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_the_end_of_an_attempt_with_a_damaged_id_is_processed(
    side: str, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(num_blocks=64)
    hand_over(pair, 8, 0)
    blocker = pair.decode_thread.post(lambda e: e.reserve(request(230))).result(LIMIT_S)
    one_request = fresh(request(60))
    left = change(monkeypatch, messages.Abort.TYPE, [100])
    attempt = pair.hand_off(one_request)
    pair.wait(lambda: pair.at_decode(lambda r: len(claims_of(r)) == 1))
    ended = pair.at_prefill if side == "prefill" else pair.at_decode
    assert ended(lambda part: part.cancel(attempt, "cancel"))
    pair.wait(lambda: attempt in pair.lost and attempt in pair.sent)
    assert not left
    reasons = pair.sent[attempt].reason, pair.lost[attempt]
    expected = ("cancel", "peer: cancel") if side == "prefill" else ("peer: cancel", "cancel")
    assert reasons == expected
    pair.decode_thread.post(lambda e: e.release(blocker)).result(LIMIT_S)
    pair.assert_clean()
