"""KvSpec and KvIdentity as bytes, for data connections and model cards. Pure.

Counts and lengths bound both encodings, and the spec begins with its version. Decoding accepts
exactly what encoding produces; anything else raises ValueError.
"""

import hashlib
import struct
from typing import get_args

from pdserve.engine.kv.identity import NAMES, KvIdentity
from pdserve.engine.kv.spec import DTYPE_BYTES, Kind, KvSpec, LayerGroup

VERSION = 1
_KINDS: tuple[Kind, ...] = get_args(Kind)
_DTYPES = tuple(DTYPE_BYTES)
_SPEC = struct.Struct("<BIB")  # version, block size, number of groups
_GROUP = struct.Struct("<BIIIBIIBH")  # ends with the number of layers
_PART = struct.Struct("<H")  # length of one part of an identity


def encode_spec(spec: KvSpec) -> bytes:
    """Return canonical bytes, equal only for equal specs."""
    encoded = _SPEC.pack(VERSION, spec.block_size, len(spec.groups))
    for group in spec.groups:
        encoded += _GROUP.pack(
            _KINDS.index(group.kind),
            group.window,
            group.num_kv_heads,
            group.head_dim,
            _DTYPES.index(group.dtype),
            group.head_start,
            group.head_end,
            group.keys_by_dim,
            len(group.layers),
        )
        encoded += struct.pack(f"<{len(group.layers)}H", *group.layers)
    return encoded


def decode_spec(data: bytes) -> KvSpec:
    """Decode the bytes of encode_spec. Raises ValueError if they are malformed."""
    try:
        version, block_size, count = _SPEC.unpack_from(data)
        if version != VERSION:
            raise ValueError(f"the KV layout has version {version}; expected version {VERSION}")
        offset = _SPEC.size
        groups = []
        for _ in range(count):
            kind, window, heads, head_dim, dtype, start, end, by_dim, num_layers = (
                _GROUP.unpack_from(data, offset)
            )
            if by_dim > 1:
                raise ValueError(f"the KV layout has an invalid flag: {by_dim}")
            offset += _GROUP.size
            layers = struct.unpack_from(f"<{num_layers}H", data, offset)
            offset += 2 * num_layers
            groups.append(
                LayerGroup(
                    layers=layers,
                    kind=_KINDS[kind],
                    window=window,
                    num_kv_heads=heads,
                    head_dim=head_dim,
                    dtype=_DTYPES[dtype],
                    head_start=start,
                    head_end=end,
                    keys_by_dim=bool(by_dim),
                )
            )
    except (struct.error, IndexError) as err:
        raise ValueError(f"the KV layout is malformed: {err}") from None
    if offset != len(data):
        raise ValueError("the KV layout has trailing bytes")
    return KvSpec(block_size, tuple(groups))


def spec_digest(spec: KvSpec) -> bytes:
    """Return the SHA-256 of the canonical bytes."""
    return hashlib.sha256(encode_spec(spec)).digest()


def encode_identity(identity: KvIdentity) -> bytes:
    """Return the identity's parts in order, each after its length."""
    parts = [v if isinstance(v, bytes) else v.encode() for v in identity.parts().values()]
    return b"".join(_PART.pack(len(part)) + part for part in parts)


def decode_identity(data: bytes) -> tuple[KvIdentity, bytes]:
    """Return the identity at the start of `data`, and the bytes after it. Raises ValueError if it
    is malformed."""
    offset = 0
    parts: list[bytes] = []
    for _ in NAMES:
        try:
            (size,) = _PART.unpack_from(data, offset)
        except struct.error as err:
            raise ValueError(f"the KV identity is malformed: {err}") from None
        offset += _PART.size
        parts.append(data[offset : offset + size])
        offset += size
    if offset > len(data):
        raise ValueError("the KV identity is truncated")
    digest, *texts = parts
    return KvIdentity(digest, *(text.decode() for text in texts)), data[offset:]
