"""Chain hashes: one per full block, over all tokens before it, for one cache and tenant."""

import hashlib
import struct

from pdserve.engine.kv import cache_seed, chain_hashes, next_hash
from pdserve.engine.kv.block_pool import HASH_BYTES


def test_one_hash_per_full_block_chained() -> None:
    seed = cache_seed(b"kv", b"")
    hashes = chain_hashes(range(11), 4, seed)
    assert [len(h) for h in hashes] == [HASH_BYTES] * 2
    first = hashlib.sha256(seed + struct.pack("<4I", 0, 1, 2, 3)).digest()[:16]
    assert hashes == [first, next_hash(first, [4, 5, 6, 7])]


def test_a_prefix_has_the_same_hashes() -> None:
    seed = cache_seed(b"kv", b"")
    assert chain_hashes(range(8), 4, seed) == chain_hashes(range(100), 4, seed)[:2]


def test_an_earlier_difference_changes_every_later_hash() -> None:
    seed = cache_seed(b"kv", b"")
    one, other = chain_hashes(range(12), 4, seed), chain_hashes([9, *range(1, 12)], 4, seed)
    assert not set(one) & set(other)


def test_identity_and_salt_separate_caches() -> None:
    seeds = [
        cache_seed(b"a", b""),
        cache_seed(b"b", b""),
        cache_seed(b"a", b"b"),
        cache_seed(b"", b"ab"),
    ]
    assert len({bytes(h) for s in seeds for h in chain_hashes(range(4), 4, s)}) == len(seeds)


def test_without_a_full_block_there_is_no_hash() -> None:
    assert chain_hashes([], 4, b"") == chain_hashes([1, 2, 3], 4, b"") == []
