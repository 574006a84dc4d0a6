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
    out = _SPEC.pack(VERSION, spec.block_size, len(spec.groups))
    for g in spec.groups:
        out += _GROUP.pack(
            _KINDS.index(g.kind),
            g.window,
            g.num_kv_heads,
            g.head_dim,
            _DTYPES.index(g.dtype),
            g.head_start,
            g.head_end,
            g.keys_by_dim,
            len(g.layers),
        )
        out += struct.pack(f"<{len(g.layers)}H", *g.layers)
    return out


def decode_spec(data: bytes) -> KvSpec:
    """Decode the bytes of encode_spec. Raises ValueError if they are malformed."""
    try:
        version, block_size, count = _SPEC.unpack_from(data)
        if version != VERSION:
            raise ValueError(f"KV layout of version {version}, not {VERSION}")
        offset = _SPEC.size
        groups = []
        for _ in range(count):
            kind, window, heads, dim, dtype, start, end, by_dim, num = _GROUP.unpack_from(
                data, offset
            )
            if by_dim > 1:
                raise ValueError(f"KV layout with a flag of {by_dim}")
            offset += _GROUP.size
            layers = struct.unpack_from(f"<{num}H", data, offset)
            offset += 2 * num
            groups.append(
                LayerGroup(
                    layers=layers,
                    kind=_KINDS[kind],
                    window=window,
                    num_kv_heads=heads,
                    head_dim=dim,
                    dtype=_DTYPES[dtype],
                    head_start=start,
                    head_end=end,
                    keys_by_dim=bool(by_dim),
                )
            )
    except (struct.error, IndexError) as err:
        raise ValueError(f"KV layout: {err}") from None
    if offset != len(data):
        raise ValueError("KV layout with trailing bytes")
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
            raise ValueError(f"KV identity: {err}") from None
        offset += _PART.size
        parts.append(data[offset : offset + size])
        offset += size
    if offset > len(data):
        raise ValueError("KV identity cut short")
    digest, *texts = parts
    return KvIdentity(digest, *(text.decode() for text in texts)), data[offset:]
