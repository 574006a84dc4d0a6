"""Frame headers, control messages and keys: round trips, fuzzing, tampering."""

import os
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from pdserve.engine.handoff.protocol import (
    PREFIX_BYTES,
    WIRE_VERSION,
    Domain,
    FrameError,
    FrameHeader,
    OtherVersion,
    Prefix,
    Ticket,
    derive_keys,
    messages,
)
from pdserve.engine.handoff.protocol.frames import FRAME_BYTES, MAX_CONTROL_BYTES
from pdserve.engine.kv import (
    KvIdentity,
    KvSpec,
    LayerGroup,
    decode_identity,
    decode_spec,
    encode_spec,
    spec_difference,
    spec_digest,
)

ID = st.binary(min_size=16, max_size=16)
TEXT = st.text(max_size=60)
IDENTITY = st.builds(KvIdentity, st.binary(max_size=32), TEXT, TEXT, TEXT, TEXT, TEXT, TEXT)
PLAIN = st.one_of(
    st.builds(
        messages.Hello,
        ID,
        ID,
        IDENTITY,
        st.sampled_from(["tcp", "shm"]),
        st.binary(max_size=4096),
        st.booleans(),
    ),
    st.builds(messages.Welcome, ID),
    st.builds(messages.Refused, TEXT),
    st.builds(messages.Gone, ID),
    st.builds(messages.Credit, st.integers(0, 65535)),
)
U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
BODY = st.one_of(
    st.builds(messages.Claim, U32, U32),
    st.builds(messages.Granted, st.lists(U32, max_size=8).map(tuple)),
    st.builds(messages.Computed, U32),
    st.builds(messages.Ack, st.lists(U64, max_size=100).map(tuple)),
    st.builds(messages.Nack, U64),
    st.builds(messages.Progress, U64),
    st.builds(messages.Complete),
    st.builds(messages.Abort, TEXT),
)
SPEC = KvSpec(
    32,
    (
        LayerGroup((0, 2), "full", 0, 3, 64, "float32", 0, 3),
        LayerGroup((1, 3), "window", 48, 3, 64, "float32", 0, 3),
    ),
)


def ticket(attempt: bytes = b"a" * 16, secret: bytes = b"s" * 32) -> Ticket:
    return Ticket(b"t" * 16, secret, attempt, b"p" * 16, b"d" * 16)


KEYS = derive_keys(ticket(), spec_digest(SPEC), b"id")


def header(**change: object) -> FrameHeader:
    fields: dict[str, object] = {
        "ticket": b"t" * 16,
        "sequence": 5,
        "slot": 1,
        "group": 0,
        "layers": range(2),
        "tokens": range(64),
        "heads": range(3),
        "payload_bytes": 1000,
        "payload_tag": b"x" * 16,
    }
    return FrameHeader(**(fields | change))  # type: ignore[arg-type]


@given(PLAIN)
def test_plain_messages_round_trip(message: messages.Plain) -> None:
    assert messages.decode(messages.encode(message)) == message


@given(BODY, U64)
def test_signed_messages_round_trip_and_any_bit_flip_is_detected(
    body: messages.Body, seq: int
) -> None:
    record = messages.sign(body, b"t" * 16, seq, KEYS.to_decode)
    message = messages.decode(record)
    assert isinstance(message, messages.Signed)
    assert (message.body, message.ticket, message.sequence) == (body, b"t" * 16, seq)
    assert message.genuine(KEYS.to_decode)
    assert not message.genuine(KEYS.to_prefill), "each direction has a different key"
    flipped = bytearray(record)
    flipped[PREFIX_BYTES + seq % (len(record) - PREFIX_BYTES)] ^= 1 << (seq % 8)
    try:
        changed = messages.decode(bytes(flipped))
    except FrameError:
        return
    assert isinstance(changed, messages.Signed)
    assert not changed.genuine(KEYS.to_decode)


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_decoders_raise_only_their_own_error(data: bytes) -> None:
    kinds = [Prefix(kind, len(data)).pack() + data for kind in range(2, 25)]
    for candidate in (data, *kinds):
        for decoder in (messages.decode, FrameHeader.unpack, Prefix.unpack):
            with suppress(FrameError):
                decoder(candidate)
        with suppress(ValueError):
            decode_spec(candidate)
        with suppress(ValueError):
            decode_identity(candidate)


HELLOS = st.builds(
    messages.Hello, ID, ID, IDENTITY, st.just("tcp"), st.just(encode_spec(SPEC)), st.booleans()
)


@given(HELLOS, st.integers(0, 2**16), st.integers(0, 255), st.booleans())
def test_a_cut_or_changed_hello_is_refused_or_decodes_to_another_hello(
    hello: messages.Hello, at: int, value: int, cut: bool
) -> None:
    body = messages.encode(hello)[PREFIX_BYTES:]
    at %= len(body)
    changed = body[:at] if cut else body[:at] + bytes([value]) + body[at + 1 :]
    try:
        found = messages.decode(Prefix(messages.Hello.TYPE, len(changed)).pack() + changed)
        assert isinstance(found, messages.Hello)
        decode_spec(found.spec)
    except (FrameError, ValueError):
        event("refused")
        return
    event("another hello" if found != hello else "the same")


def test_another_wire_version_is_named_in_the_error() -> None:
    record = bytearray(messages.encode(messages.Credit(1)))
    record[2] = 77
    with pytest.raises(OtherVersion, match=f"wire version {WIRE_VERSION} on this side, 77 on"):
        messages.decode(bytes(record))


def test_oversized_records_are_refused_by_their_prefix() -> None:
    with pytest.raises(FrameError):
        Prefix.unpack(Prefix(16, MAX_CONTROL_BYTES + 1).pack())
    with pytest.raises(FrameError):
        Prefix.unpack(Prefix(1, FRAME_BYTES).pack())


@pytest.mark.parametrize(
    ("kind", "most"),
    [(messages.Granted, messages.MAX_GROUPS), (messages.Ack, messages.MAX_SEQUENCES)],
)
def test_the_count_of_numbers_in_a_record_is_limited(kind: Any, most: int) -> None:
    def decoded(num: int) -> object:
        body = kind(tuple(range(num)))
        message = messages.decode(messages.sign(body, b"t" * 16, 1, KEYS.to_decode))
        assert isinstance(message, messages.Signed)
        return message.body

    assert decoded(most) == kind(tuple(range(most)))
    with pytest.raises(FrameError, match=f"{kind.__name__} has an invalid length"):
        decoded(most + 1)


def test_header_round_trip_and_tag() -> None:
    signed = header().pack()
    tag = KEYS.to_decode.tag(Domain.HEADER, 5, signed)
    parsed, covered, parsed_tag = FrameHeader.unpack(signed + tag)
    assert parsed == header()
    assert KEYS.to_decode.matches(Domain.HEADER, 5, covered, parsed_tag)
    assert not KEYS.to_decode.matches(Domain.PAYLOAD, 5, covered, parsed_tag)


def test_empty_ranges_are_refused(subtests: pytest.Subtests) -> None:
    for change in (
        {"layers": range(2, 2)},
        {"tokens": range(64, 64)},
        {"payload_bytes": 0},
        {"heads": range(0)},
    ):
        with subtests.test(change=change), pytest.raises(FrameError):
            FrameHeader.unpack(header(**change).pack() + b"\0" * 16)


@given(st.integers(0, FRAME_BYTES * 8 - 1))
def test_a_bit_flip_in_a_header_is_detected(bit: int) -> None:
    signed = header().pack()
    record = bytearray(signed + KEYS.to_decode.tag(Domain.HEADER, 5, signed))
    record[bit // 8] ^= 1 << (bit % 8)
    try:
        parsed, covered, tag = FrameHeader.unpack(bytes(record))
    except FrameError:
        return
    assert not KEYS.to_decode.matches(Domain.HEADER, parsed.sequence, covered, tag)


@given(st.binary(min_size=1, max_size=2000), U64, st.integers(0, 2**20))
def test_a_sealed_payload_opens_only_with_its_key_sequence_and_bytes(
    data: bytes, seq: int, bit: int
) -> None:
    key = KEYS.to_decode
    sealed = bytes(key.seal(seq, data))
    content, tag = sealed[: len(data)], sealed[len(data) :]
    assert len(tag) == 16
    assert key.unseal(seq, content, tag) == data
    assert key.unseal(seq ^ 1, content, tag) is None, "another sequence has another nonce"
    assert KEYS.to_prefill.unseal(seq, content, tag) is None
    flipped = bytearray(sealed)
    flipped[bit // 8 % len(sealed)] ^= 1 << (bit % 8)
    assert key.unseal(seq, flipped[: len(data)], bytes(flipped[len(data) :])) is None


def test_keys_depend_on_all_parameters_of_the_handshake() -> None:
    other = os.urandom(16)
    spec = spec_digest(SPEC)
    variants = [
        derive_keys(ticket(), spec, b"id"),
        derive_keys(ticket(attempt=other), spec, b"id"),
        derive_keys(ticket(secret=b"S" * 32), spec, b"id"),
        derive_keys(Ticket(b"t" * 16, b"s" * 32, b"a" * 16, other, b"d" * 16), spec, b"id"),
        derive_keys(Ticket(b"t" * 16, b"s" * 32, b"a" * 16, b"p" * 16, other), spec, b"id"),
        derive_keys(ticket(), spec[::-1], b"id"),
        derive_keys(ticket(), spec, b"other"),
    ]
    tags = {keys.to_decode.tag(Domain.PAYLOAD, 1, b"data") for keys in variants}
    assert len(tags) == len(variants)


def test_kv_layout_round_trips_and_a_difference_is_named() -> None:
    assert decode_spec(encode_spec(SPEC)) == SPEC
    assert spec_difference(SPEC, SPEC) == ""
    assert (
        spec_difference(SPEC, KvSpec(16, SPEC.groups))
        == "block size 32 on this side, 16 on the peer"
    )
    other = KvSpec(32, (SPEC.groups[0], LayerGroup((1, 3), "window", 64, 3, 64, "float32", 0, 3)))
    assert spec_difference(SPEC, other) == "window of group 1: 48 on this side, 64 on the peer"
