"""KvSpec and KvIdentity as bytes: round trips, and errors for invalid bytes."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.kv import (
    KvIdentity,
    KvSpec,
    LayerGroup,
    decode_identity,
    decode_spec,
    encode_identity,
    encode_spec,
    spec_digest,
)
from pdserve.engine.kv.spec import DTYPE_BYTES

SMALL = st.integers(0, 2**16 - 1)
GROUP = st.builds(
    LayerGroup,
    layers=st.lists(SMALL, max_size=40).map(tuple),
    kind=st.sampled_from(["full", "window", "latent"]),
    window=SMALL,
    num_kv_heads=SMALL,
    head_dim=SMALL,
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    head_start=SMALL,
    head_end=SMALL,
    keys_by_dim=st.booleans(),
)
SPEC = st.builds(KvSpec, st.integers(0, 2**32 - 1), st.lists(GROUP, max_size=4).map(tuple))
TEXT = st.text(max_size=60)
IDENTITY = st.builds(KvIdentity, st.binary(max_size=32), TEXT, TEXT, TEXT, TEXT, TEXT, TEXT)


@given(SPEC, SPEC)
def test_equal_bytes_are_equal_specs(one: KvSpec, other: KvSpec) -> None:
    assert decode_spec(encode_spec(one)) == one
    assert (encode_spec(one) == encode_spec(other)) == (one == other)
    assert (spec_digest(one) == spec_digest(other)) == (one == other)


@given(SPEC, st.integers(0, 2**16), st.integers(0, 255), st.booleans())
def test_a_changed_encoding_is_refused_or_decodes_to_another_spec(
    spec: KvSpec, at: int, value: int, cut: bool
) -> None:
    data = encode_spec(spec)
    at %= len(data)
    if cut:
        with pytest.raises(ValueError, match="KV layout"):
            decode_spec(data[:at])
        return
    changed = data[:at] + bytes([value]) + data[at + 1 :]
    with suppress(ValueError):
        assert encode_spec(decode_spec(changed)) == changed


def test_other_versions_and_trailing_bytes_are_refused(subtests: pytest.Subtests) -> None:
    for data in (b"", bytes(6), b"\x02" + bytes(5), b"\x01" + bytes(6)):
        with subtests.test(data=data), pytest.raises(ValueError, match="KV layout"):
            decode_spec(data)


@given(IDENTITY, st.binary(max_size=20))
def test_decoding_an_identity_returns_the_remaining_bytes(
    identity: KvIdentity, rest: bytes
) -> None:
    assert decode_identity(encode_identity(identity) + rest) == (identity, rest)


@given(IDENTITY, st.integers(0, 2**16))
def test_a_truncated_identity_is_refused(identity: KvIdentity, at: int) -> None:
    data = encode_identity(identity)
    with pytest.raises(ValueError, match="KV identity"):
        decode_identity(data[: at % len(data)])


@given(st.binary(max_size=300))
def test_random_bytes_raise_only_value_error(data: bytes) -> None:
    for decode in (decode_spec, decode_identity):
        with suppress(ValueError):
            decode(data)
