"""The KV blocks of one layer group: free list, reference counts, and a prefix cache that finds
blocks by chain hash. Pure.

A block is in exactly one state, the first of these that applies: *used* (a sequence refers to it),
*reserved* (a KV transfer that is not committed refers to it), *cached* (unreferenced, but its
content can be found by hash) or *free*. So free + used + cached + reserved == num_blocks at every
moment. Block 0 is the null block: it pads block tables, has no owner and is not counted.

The chain hash of a block covers its token ids and those of all blocks before it: in one prefix
cache, equal hashes mean equal tokens from token 0 on. Hashes are SHA-256 cut to 128 bits, so that a
tenant cannot make a block that another tenant's prompt matches. The router computes the same
hashes.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

HASH_BYTES = 16
ID_BYTES = 4


def cache_seed(kv_identity: bytes, cache_salt: bytes) -> bytes:
    """Return the seed of a chain of block hashes, the parent of the first block's hash. Different
    KV identities or cache salts have different seeds, and so cannot share cached blocks."""
    head = struct.pack("<II", len(kv_identity), len(cache_salt))
    return _hash(b"pdserve kv cache" + head + kv_identity + cache_salt)


def next_hash(parent: bytes, ids: Sequence[int]) -> bytes:
    """Return the chain hash of one full block. `parent`: hash of the block before it; `ids`: the
    block's token ids, each below 2**32."""
    return _hash(parent + _pack(ids))


def chain_hashes(ids: Sequence[int], block_size: int, seed: bytes) -> list[bytes]:
    """Return the chain hash of each full block of `ids`. `seed`: the value of cache_seed(...)."""
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


NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Order to copy a whole KV block, in every layer of a layer group."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Number of a pool's blocks in each state."""

    free: int
    used: int
    cached: int
    reserved: int

    @property
    def total(self) -> int:
        return self.free + self.used + self.cached + self.reserved


def num_blocks(tables: Iterable[Iterable[int]]) -> int:
    """Return how many blocks these block tables contain, without null blocks."""
    return sum(block != NULL_BLOCK for table in tables for block in table)


class BlockPool:
    """Pool of the KV blocks 1 to num_blocks of a layer group, with a prefix cache. When it runs out
    of free blocks, it evicts the least recently released cached block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))  # a stack
        self._used = [0] * (num_blocks + 1)  # references held by sequences
        self._reserved = [0] * (num_blocks + 1)  # references held by reservations
        self._num_used = 0
        self._num_reserved = 0
        self._idle: dict[int, None] = {}  # cached blocks, least recently released first
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    @property
    def num_available(self) -> int:
        """Number of blocks that can be allocated: free ones, and cached ones, which are evicted for
        it."""
        return len(self._free) + len(self._idle)

    def counts(self) -> BlockCounts:
        return BlockCounts(len(self._free), self._num_used, len(self._idle), self._num_reserved)

    def references(self) -> tuple[Counter[int], Counter[int]]:
        """Count the references to each block: those of sequences, and those of reservations. Takes
        time in proportion to the size of the pool."""
        used, reserved = (
            Counter({block: count for block, count in enumerate(refs) if count})
            for refs in (self._used, self._reserved)
        )
        return used, reserved

    def allocate(self, count: int, reserved: bool = False) -> list[int]:
        """Allocate `count` blocks with one reference each; evict cached blocks if too few are free.
        Raises ValueError if `count` exceeds num_available."""
        if count > self.num_available:
            raise ValueError(f"cannot allocate {count} blocks: {self.num_available} are available")
        blocks = []
        for _ in range(count):
            if not self._free:
                self._evict()
            block = self._free.pop()
            self._refer(block, reserved)
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int], reserved: bool = False) -> None:
        """Add one reference to each of these used, reserved or cached blocks. Raises ValueError if
        a block is free."""
        for block in blocks:
            if block in self._idle:
                del self._idle[block]
            elif not self._used[block] and not self._reserved[block]:
                raise ValueError(f"cannot share block {block}: it is free")
            self._refer(block, reserved)

    def release(self, blocks: Iterable[int], reserved: bool = False) -> None:
        """Remove one reference from each block. Blocks without references stay cached if they can
        be found by hash, and the first of `blocks` is then evicted first. Raises ValueError if a
        block has no reference to remove."""
        for block in blocks:
            refs = self._reserved if reserved else self._used
            if not refs[block]:
                raise ValueError(f"block {block} has no reference to release")
            old_state = self._state(block)
            refs[block] -= 1
            self._count(old_state, self._state(block))
            if not self._used[block] and not self._reserved[block]:
                if block in self._hash_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def commit(self, blocks: Iterable[int]) -> None:
        """Turn one reservation's reference to each block into a sequence's. Raises ValueError if a
        block has no reference of a reservation."""
        for block in blocks:
            if not self._reserved[block]:
                raise ValueError(f"cannot commit block {block}: it is not reserved")
            old_state = self._state(block)
            self._reserved[block] -= 1
            self._used[block] += 1
            self._count(old_state, self._state(block))

    def writable(self, block: int) -> bool:
        """Whether the only sequence or reservation that refers to a block may write it: the block
        is not shared and cannot be found by hash."""
        return self._used[block] + self._reserved[block] == 1 and block not in self._hash_of

    def is_cached(self, block: int) -> bool:
        """Whether nothing refers to the block, so that it is kept only for the prefix cache."""
        return block in self._idle

    def find(self, chain_hash: bytes) -> int | None:
        """Return the block in the prefix cache with this chain hash; None if there is none."""
        return self._by_hash.get(chain_hash)

    def register(self, block: int, chain_hash: bytes) -> None:
        """Add a full, computed block to the prefix cache. Does nothing if an equal block is in it
        already."""
        if chain_hash in self._by_hash or block in self._hash_of:
            return
        self._by_hash[chain_hash] = block
        self._hash_of[block] = chain_hash
        if chain_hash in self._removed:
            del self._removed[chain_hash]
        else:
            self._added[chain_hash] = None

    def forget(self, blocks: Iterable[int]) -> None:
        """Remove these blocks from the prefix cache; references to them stay."""
        for block in blocks:
            chain_hash = self._hash_of.pop(block, None)
            if chain_hash is None:
                continue
            del self._by_hash[chain_hash]
            if chain_hash in self._added:
                del self._added[chain_hash]
            else:
                self._removed[chain_hash] = None

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """Return the chain hashes that the prefix cache has gained and lost since the last call, as
        (added, removed)."""
        events = list(self._added), list(self._removed)
        self._added, self._removed = {}, {}
        return events

    def _evict(self) -> None:
        block = next(iter(self._idle))
        del self._idle[block]
        self.forget([block])
        self._free.append(block)

    def _refer(self, block: int, reserved: bool) -> None:
        old_state = self._state(block)
        refs = self._reserved if reserved else self._used
        refs[block] += 1
        self._count(old_state, self._state(block))

    def _state(self, block: int) -> int:
        return 2 if self._used[block] else 1 if self._reserved[block] else 0

    def _count(self, old_state: int, new_state: int) -> None:
        self._num_used += (new_state == 2) - (old_state == 2)
        self._num_reserved += (new_state == 1) - (old_state == 1)
