"""Chain hashes of full KV blocks: in one cache, equal hashes mean equal tokens from token 0 on.

Pure and without torch, because the router also hashes prompts with it. SHA-256 cut to 128 bits, so
that a tenant cannot make a block that another tenant's prompt matches.
"""

import hashlib
import struct
from collections.abc import Sequence

HASH_BYTES = 16
ID_BYTES = 4


def cache_seed(kv_identity: bytes, cache_salt: bytes) -> bytes:
    """Return the parent of a chain's first hash; it separates KV identities and tenants' salts."""
    head = struct.pack("<II", len(kv_identity), len(cache_salt))
    return _hash(b"pdserve kv cache" + head + kv_identity + cache_salt)


def next_hash(parent: bytes, ids: Sequence[int]) -> bytes:
    """Return the hash of one full block of token ids (each below 2**32) that follows `parent`."""
    return _hash(parent + _pack(ids))


def chain_hashes(ids: Sequence[int], block_size: int, seed: bytes) -> list[bytes]:
    """Return one hash per full block of `ids`; `seed` is cache_seed(...)."""
    num_blocks = len(ids) // block_size
    packed = _pack(ids[: num_blocks * block_size])
    hashes: list[bytes] = []
    parent = seed
    for start in range(0, len(packed), ID_BYTES * block_size):
        parent = _hash(parent + packed[start : start + ID_BYTES * block_size])
        hashes.append(parent)
    return hashes


def _pack(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def _hash(block: bytes) -> bytes:
    return hashlib.sha256(block).digest()[:HASH_BYTES]
