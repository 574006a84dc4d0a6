"""The KV blocks of one layer group: free list, reference counts, and a prefix cache by chain hash.
Pure.

A block is in exactly one state, the first that applies: *used* (a sequence refers to it),
*reserved* (an uncommitted KV transfer refers to it), *cached* (unreferenced, but its content can be
found by hash) or *free*. So free + used + cached + reserved == num_blocks at every moment. Block 0
is the null block: it pads block tables, has no owner and is not counted.

In one cache, equal chain hashes mean equal tokens from token 0 on. They are SHA-256 cut to 128
bits, so that a tenant cannot make a block that another tenant's prompt matches. The router computes
them too.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

HASH_BYTES = 16
ID_BYTES = 4


def cache_seed(kv_identity: bytes, cache_salt: bytes) -> bytes:
    """Return a chain's first parent, which differs by KV identity and by tenant's salt."""
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


NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy of a whole block, in every layer of a group."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state."""

    free: int
    used: int
    cached: int
    reserved: int

    @property
    def total(self) -> int:
        return self.free + self.used + self.cached + self.reserved


def num_blocks(tables: Iterable[Iterable[int]]) -> int:
    """Return how many blocks these tables have, without the null block."""
    return sum(block != NULL_BLOCK for table in tables for block in table)


class BlockPool:
    """Pool of blocks 1..num_blocks; the least recently released cached block is evicted first."""

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
        """Number of blocks that `allocate` can return: free and cached ones."""
        return len(self._free) + len(self._idle)

    def counts(self) -> BlockCounts:
        return BlockCounts(len(self._free), self._num_used, len(self._idle), self._num_reserved)

    def references(self) -> tuple[Counter[int], Counter[int]]:
        """Count references by block: of sequences, and of reservations. Reads the whole pool."""
        used, reserved = (
            Counter({block: count for block, count in enumerate(refs) if count})
            for refs in (self._used, self._reserved)
        )
        return used, reserved

    def allocate(self, count: int, reserved: bool = False) -> list[int]:
        """Allocate `count` blocks with one reference each, evicting cached ones. Raises ValueError
        if `count` exceeds num_available."""
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
        """Add a reference to each block. Raises ValueError if one is free."""
        for block in blocks:
            if block in self._idle:
                del self._idle[block]
            elif not self._used[block] and not self._reserved[block]:
                raise ValueError(f"block {block} is free")
            self._refer(block, reserved)

    def release(self, blocks: Iterable[int], reserved: bool = False) -> None:
        """Remove one reference of each block; the first of `blocks` is evicted first. Raises
        ValueError for a block without such a reference."""
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
        """Make references of a reservation a sequence's. Raises ValueError if one is missing."""
        for block in blocks:
            if not self._reserved[block]:
                raise ValueError(f"block {block} is not reserved")
            old_state = self._state(block)
            self._reserved[block] -= 1
            self._used[block] += 1
            self._count(old_state, self._state(block))

    def writable(self, block: int) -> bool:
        """Whether the only holder of a block may write it: not shared, and not findable by hash."""
        return self._used[block] + self._reserved[block] == 1 and block not in self._hash_of

    def is_cached(self, block: int) -> bool:
        """Whether the block is unreferenced and kept only for its content."""
        return block in self._idle

    def find(self, chain_hash: bytes) -> int | None:
        """Return the block with this content, if any."""
        return self._by_hash.get(chain_hash)

    def register(self, block: int, chain_hash: bytes) -> None:
        """Make a full, computed block findable. Of equal blocks, the first stays findable."""
        if chain_hash in self._by_hash or block in self._hash_of:
            return
        self._by_hash[chain_hash] = block
        self._hash_of[block] = chain_hash
        if chain_hash in self._removed:
            del self._removed[chain_hash]
        else:
            self._added[chain_hash] = None

    def forget(self, blocks: Iterable[int]) -> None:
        """Make referenced blocks impossible to find."""
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
        """Return (added, removed) findable hashes since the last call."""
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
