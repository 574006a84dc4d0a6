"""Identities on which both sides must agree, allowed differences, and sealed frames."""

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.engine_kit import fake_engine
from fakes.decoder import words
from systems.eventually import LIMIT_S
from systems.handoff_pair import DIRECT_TRANSPORTS, MakePair, Pair, fresh, local, request
from systems.link_ends import make_transport

from pdserve.engine.handoff.outgoing import OutgoingHandoff
from pdserve.engine.handoff.protocol import frames, messages
from pdserve.engine.handoff.receiver import Receiver
from pdserve.engine.kv import KvIdentity, Mixing, cache_seed, chain_hashes, encode_spec
from pdserve.engine.transport import Frame, Target
from pdserve.engine.transport.base import transports

TRANSPORTS = list(transports())
HOST_TRANSPORTS = [name for name in transports() if name not in DIRECT_TRANSPORTS]
IDENTITY = KvIdentity(b"i" * 16, "aa", "Q4_1", "cc", "70", "float32", "reference")
OTHER_WEIGHTS = replace(IDENTITY, digest=b"w" * 16, weights="bb", quantization="Q8_0")
OTHER_NUMERICS = replace(IDENTITY, digest=b"n" * 16, numerics="native")


def pair_of(
    prefill: KvIdentity, decode: KvIdentity, mixing: Mixing, folder: Path, **change: Any
) -> Pair:
    engines = fake_engine(num_blocks=256), fake_engine(num_blocks=256)
    for engine, identity in zip(engines, (prefill, decode), strict=True):
        engine.kv_identity = identity
    return Pair(*engines, "tcp", folder, mixing=mixing, **change)


def refused(pair: Pair) -> str:
    """Return why a hand-off did not begin, as reported by prefill."""
    attempt = pair.hand_off(request(50))
    pair.wait(lambda: attempt in pair.sent)
    pair.at_decode(lambda r: r.cancel(attempt, "the router heard of it"))
    reason = pair.sent[attempt].reason
    pair.assert_clean()
    assert not pair.received
    return reason


OTHERS = [
    (OTHER_WEIGHTS, "weights aa (Q4_1) at decode, bb (Q8_0) at prefill"),
    (OTHER_NUMERICS, "numerics id reference at decode, native at prefill"),
    (replace(IDENTITY, tokenizer="71"), "tokenizer 70 at decode, 71 at prefill"),
    (
        replace(IDENTITY, digest=b"d" * 16, kv_dtype="bf16"),
        "KV dtype float32 at decode, bf16 at prefill",
    ),
    (
        replace(IDENTITY, digest=b"c" * 16, configuration="cd"),
        "model configuration cc at decode, cd at prefill",
    ),
    (KvIdentity(b"?" * 16), "KV identity 696969696969 at decode, 3f3f3f3f3f3f at prefill"),
]
MIXINGS = [Mixing(), Mixing(True, False), Mixing(False, True)]


def test_another_identity_is_refused_by_name(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for (other, text), mixing in product(OTHERS, MIXINGS):
        case = subtests.test(other=text, mixing=mixing)
        with case, closing(pair_of(other, IDENTITY, mixing, tmp_path)) as pair:
            admitted = (other is OTHER_WEIGHTS and mixing.weights) or (
                other is OTHER_NUMERICS and mixing.numerics
            )
            if not admitted:
                assert refused(pair) == f"cannot reach decode: tcp: refused by decode: {text}"
            else:
                job = request(50)
                attempt = pair.hand_off(job)
                assert pair.answer(job) == local(job)
                assert pair.received[attempt].inexact
                assert pair.at_decode(lambda r: r.counters["inexact"]) == 1
                pair.assert_clean()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_same_identity_is_exact(transport: str, make_pair: MakePair) -> None:
    pair = make_pair(transport, mixing=Mixing(True, True))
    job = request(50)
    attempt = pair.hand_off(job)
    assert pair.answer(job) == local(job)
    assert not pair.received[attempt].inexact
    assert pair.at_decode(lambda r: r.counters["inexact"]) == 0


def test_blocks_of_another_identity_are_cached_for_that_pair_only(tmp_path: Path) -> None:
    pair = pair_of(OTHER_WEIGHTS, IDENTITY, Mixing(weights=True), tmp_path)
    job = request(50)
    first, ids = pair.hand_off(job), job.prompt_ids
    pair.answer(job)
    added, _ = pair.decode_thread.post(lambda e: e.take_prefix_events()).result(LIMIT_S)
    mixed = chain_hashes(ids[:48], 4, cache_seed(OTHER_WEIGHTS.digest + IDENTITY.digest, b""))
    assert len(mixed) == 12
    assert set(mixed) <= set(added)
    for seed in (IDENTITY.digest, OTHER_WEIGHTS.digest):
        assert set(chain_hashes(ids, 4, cache_seed(seed, b""))).isdisjoint(added)
    # A prompt that decode computes itself finds none of them; the next one of the pair does.
    own = fresh(job)
    pair.decode_thread.post(lambda e: e.submit(own)).result(LIMIT_S)
    assert pair.answer(own) == local(job)
    hits = pair.decode_thread.post(lambda e: e.stats().prefix_hits).result(LIMIT_S)
    assert hits == 0
    again = fresh(job)
    second = pair.hand_off(again)
    assert pair.answer(again) == local(job)
    assert (pair.received[first].cached_tokens, pair.received[second].cached_tokens) == (0, 48)
    pair.assert_clean()
    pair.close()


@pytest.mark.parametrize("transport", HOST_TRANSPORTS)
@pytest.mark.parametrize("window", [0, 10])
def test_sealed_frames_give_the_same_tokens(
    transport: str, window: int, make_pair: MakePair
) -> None:
    pair = make_pair(transport, window=window, encrypted=True)
    for length in (2, 5, 17, 200):
        job = request(length)
        attempt = pair.hand_off(job)
        assert pair.answer(job) == local(job, window=window)
        pair.wait(lambda a=attempt: a in pair.sent)
        assert pair.received[attempt].num_bytes == pair.sent[attempt].num_bytes > 0
    pair.assert_clean()


@pytest.mark.parametrize("transport", HOST_TRANSPORTS)
@pytest.mark.parametrize("encrypted", [False, True])
def test_no_plain_kv_passes_the_wire_when_it_is_sealed(
    transport: str, encrypted: bool, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On shm other processes could read the slot; the parts of a frame are what is put there."""
    passed: list[bytes] = []
    records: list[bytes] = []
    build = OutgoingHandoff._build

    @contextmanager
    def spy(self: OutgoingHandoff, *args: Any) -> Iterator[Frame | None]:
        with build(self, *args) as frame:
            if frame is not None:
                passed.append(b"".join(frame.parts))
                records.append(frame.record)
            yield frame

    monkeypatch.setattr(OutgoingHandoff, "_build", spy)
    pair = make_pair(transport, encrypted=encrypted)
    job = request(200)
    pair.hand_off(job)
    assert pair.answer(job) == local(job)
    ids = torch.tensor(job.prompt_ids)
    keys = [key.numpy().tobytes() for key in words(ids, torch.arange(len(ids)))[:, 0]]
    marks = [b"".join(keys[at : at + 4]) for at in range(0, 196, 4)]
    everything = b"".join(passed)
    found = [mark for mark in marks if mark in everything]
    assert passed
    assert len(found) == (0 if encrypted else len(marks))
    assert not any(mark in record for mark in marks for record in records)


def test_nothing_is_sealed_on_a_device(make_pair: MakePair) -> None:
    pair = make_pair("cuda_ipc", encrypted=True)
    assert refused(pair).endswith("encrypted payloads cannot be copied on a device (--encrypt-kv)")


def test_a_changed_sealed_frame_is_resent_under_a_new_nonce(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, seen = Receiver.payload, []

    def payload(receiver: Any, link: Any, header: Any, data: memoryview) -> None:
        seen.append(header.sequence)
        if len(seen) <= 2:
            data[-1] ^= 128
        original(receiver, link, header, data)

    monkeypatch.setattr(Receiver, "payload", payload)
    pair = make_pair(encrypted=True)
    job = request(200)
    pair.hand_off(job)
    assert pair.answer(job) == local(job)
    assert pair.receiver.counters["corrupt_frames"] == pair.sender.counters["resent"] == 2
    assert len(seen) == len(set(seen)) >= 3
    pair.assert_clean()


@pytest.mark.parametrize("encrypted", [False, True])
def test_both_sides_must_agree_on_encryption(encrypted: bool, make_pair: MakePair) -> None:
    pair = make_pair(encrypted=encrypted, decode_encrypted=not encrypted)
    decode, prefill = ("off", "on") if encrypted else ("on", "off")
    text = f"KV encryption {decode} at decode, {prefill} at prefill (--encrypt-kv)"
    assert refused(pair).endswith(text)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_another_wire_version_is_refused_by_name_on_both_sides(
    transport: str, make_pair: MakePair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_pair(transport)
    hello = messages.Hello(
        pair.prefill_incarnation,
        pair.decode_incarnation,
        IDENTITY,
        transport,
        encode_spec(pair.prefill.kv.spec),
    )
    record = bytearray(messages.encode(hello))
    record[2] = frames.WIRE_VERSION + 5  # after the magic
    address = pair.addresses[transport]
    if transport == "tcp":
        host, port = address.rsplit(":", 1)
        sock = socket.create_connection((host, int(port)))
    else:
        sock = (
            make_transport(transport, tmp_path).dial(Target("", pair.decode_incarnation), 1.0).sock
        )
    with sock:
        sock.settimeout(10)
        sock.sendall(bytes(record))
        answer = sock.recv(1000)
    refusal = messages.decode(answer)
    text = f"wire version {frames.WIRE_VERSION} on this side, {frames.WIRE_VERSION + 5} on the peer"
    assert refusal == messages.Refused(text)
    as_the_other_reads_it = bytearray(answer)
    as_the_other_reads_it[2] += 1
    with pytest.raises(frames.OtherVersion, match=f"side, {frames.WIRE_VERSION + 1} on"):
        messages.decode(bytes(as_the_other_reads_it))
    job = request(50)
    pair.hand_off(job)
    assert pair.answer(job) == local(job), "its own version is still accepted"
    pair.assert_clean()
    assert "connection failed" not in caplog.text, (
        "it has ended as refused, without a fault of decode"
    )
