"""Chain hashes of full KV blocks: equal hashes mean equal tokens from token 0 on, in one cache.

Pure, without torch: the router hashes prompts with it too. SHA-256 cut to 128 bits, so a tenant
cannot make a block that another tenant's prompt matches.
"""

import hashlib
import struct
from collections.abc import Sequence

HASH_BYTES = 16


def cache_seed(kv_identity: bytes, cache_salt: bytes) -> bytes:
    """The parent of a chain's first hash. It says whose KV it is and which tenant may share it."""
    head = struct.pack("<II", len(kv_identity), len(cache_salt))
    return hashlib.sha256(b"pdserve kv cache" + head + kv_identity + cache_salt).digest()[
        :HASH_BYTES
    ]


def next_hash(parent: bytes, ids: Sequence[int]) -> bytes:
    """The hash of one full block of token ids (each below 2**32) that follows `parent`."""
    return hashlib.sha256(parent + struct.pack(f"<{len(ids)}I", *ids)).digest()[:HASH_BYTES]


def chain_hashes(ids: Sequence[int], block_size: int, seed: bytes) -> list[bytes]:
    """One hash per full block of `ids`; `seed` is cache_seed(...)."""
    hashes: list[bytes] = []
    parent = seed
    for start in range(0, len(ids) - block_size + 1, block_size):
        parent = next_hash(parent, ids[start : start + block_size])
        hashes.append(parent)
    return hashes
