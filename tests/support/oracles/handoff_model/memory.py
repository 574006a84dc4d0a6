"""The blocks of both sides: the real job table, block tables and pools, as interned objects.

A memory is one object per distinct state; an operation copies it, changes the copy with the
product's own code and looks the result up, once per (state, operation). The world keeps numbers.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from oracles.handoff_model.config import Config
from oracles.handoff_model.rules import Rules, Violation
from pdserve.engine.api import Request, SamplingParams
from pdserve.engine.kv import (
    NULL_BLOCK,
    BlockCopy,
    BlockPool,
    KvSpec,
    LayerGroup,
    cache_seed,
    chain_hashes,
)
from pdserve.engine.scheduling import JobTable, RequestState, Reservation

BLOCK_SIZE = 2
SPEC = KvSpec(BLOCK_SIZE, (LayerGroup((0,), "full", 0, 1, 1, "float32", 0, 1),))
SEED = cache_seed(b"model", b"")


class Values:
    """Possible contents of a block: a number per chain hash, so equal prefixes are equal values.

    0: the content before any write.
    """

    TORN = -1

    def __init__(self, config: Config) -> None:
        self.of_hash: dict[bytes, int] = {}
        chains = [chain_hashes(prompt, BLOCK_SIZE, SEED) for prompt in config.prompts]
        for chain in chains:
            for one in chain:
                self.of_hash.setdefault(one, len(self.of_hash) + 1)
        self.of_request = [tuple(self.of_hash[one] for one in chain) for chain in chains]


@dataclass(frozen=True, slots=True)
class Granted:
    """A reservation, as the receiver keeps it."""

    table: tuple[int, ...]
    first: int
    num_tokens: int
    copies: tuple[tuple[int, int], ...]


class DecodeBlocks:
    """Decode's job table with the requests of attempts; key of attempt a: str(a)."""

    def __init__(self, config: Config, rules: Rules) -> None:
        self.prompts = config.prompts
        self.attempts = config.attempts
        self.jobs = JobTable(rules.tables(SPEC, (config.blocks,), 1), num_slots=8)
        self.open: dict[int, Reservation] = {}

    @property
    def pool(self) -> BlockPool:
        return self.jobs.tables.pools[0]

    def reserve(self, attempt: int) -> Granted | None:
        """Implements Engine.reserve."""
        prompt = self.prompts[attempt // self.attempts]
        request = Request(str(attempt), prompt, SamplingParams(max_tokens=1), seed=0)
        job = RequestState(request, order=attempt, arrived_s=0.0, max_tokens=1, seed_hash=SEED)
        made = self.jobs.reserve(job)
        if made is None:
            return None
        reservation, copies = made
        self.open[attempt] = reservation
        table = tuple(reservation.blocks[0])
        return Granted(table, reservation.first_block[0], reservation.num_tokens, _pairs(copies))

    def verified(self, attempt: int, num_tokens: int) -> None:
        """Implements Engine.verified."""
        self.jobs.verified(self.open[attempt], num_tokens)

    def commit(self, attempt: int) -> tuple[int, ...]:
        """Implements Engine.commit; returns its blocks."""
        reservation = self.open.pop(attempt)
        self.jobs.commit(reservation)
        return tuple(reservation.blocks[0])

    def release(self, attempt: int) -> None:
        """Implements Engine.release."""
        found = self.open.pop(attempt, None)
        if found is None:
            raise Violation("blocks are freed that are not reserved any more")
        self.jobs.release(found)

    def abort(self, attempt: int) -> bool:
        """Implements Engine.abort of a whole request."""
        job = self.jobs.by_key.get(str(attempt))
        if job is None:
            return False
        self.jobs.end(job)
        if attempt in self.open:
            self.open.pop(attempt)
        return True

    def finish(self, attempt: int) -> tuple[tuple[int, int], ...] | None:
        """Run the row of the last prompt token, which is the last one. None: blocks are short."""
        job = self.jobs.by_key[str(attempt)]
        self.jobs.admit(job)
        sequence = job.sequences[0]
        copies = self.jobs.extend(sequence, len(sequence.ids))
        if copies is None:
            return None
        self.jobs.advance(sequence, len(sequence.ids))
        self.jobs.end(job)
        return _pairs(copies)

    def table(self, attempt: int) -> tuple[int, ...]:
        """Return the blocks of a request in the batch."""
        (sequence,) = self.jobs.by_key[str(attempt)].sequences
        return tuple(sequence.block_tables[0])

    def may_write(self, attempt: int, block: int) -> bool:
        """Return whether the block is reserved for this attempt alone, and cannot be found by its
        content.
        """
        found = self.open.get(attempt)
        return (
            found is not None
            and found.open
            and block in found.blocks[0][found.first_block[0] :]
            and self.pool.writable(block)
        )

    def owner(self, block: int) -> int | None:
        """Return an attempt that holds the block."""
        for name, job in self.jobs.by_key.items():
            if any(block in s.block_tables[0] for s in job.sequences):
                return int(name)
        return None

    def evict(self, block: int) -> None:
        """Evict this cached block for other work."""
        pool = self.pool
        pool._idle = {block: None, **pool._idle}
        pool._evict()

    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for equal states. Free blocks are alike, so the lowest is
        always the next.
        """
        pool = self.pool
        pool._free.sort(reverse=True)
        pool.take_events()
        hashes = tuple(sorted(pool._hash_of.items()))
        counts = tuple(pool._free), tuple(pool._used), tuple(pool._reserved), tuple(pool._idle)
        jobs = []
        for name, job in sorted(self.jobs.by_key.items()):
            (s,) = job.sequences
            place = name in self.jobs.reserved, name in self.jobs.waiting
            jobs.append((name, place, tuple(s.block_tables[0]), s.num_computed, s.num_published))
        opened = tuple(
            (a, r.state.value, tuple(r.first_block)) for a, r in sorted(self.open.items())
        )
        return counts, hashes, tuple(jobs), opened

    def check(self) -> None:
        """Check that every reference has an owner, and every block one state."""
        pool = self.pool
        counts = pool.counts()
        if counts.total != pool.num_blocks:
            raise Violation(f"{counts} of {pool.num_blocks} blocks")
        tables = [s.block_tables[0] for job in self.jobs.by_key.values() for s in job.sequences]
        for block in range(1, pool.num_blocks + 1):
            named = sum(table.count(block) for table in tables)
            if named != pool._used[block] + pool._reserved[block]:
                raise Violation(f"block {block} has references without a holder")

    @property
    def idle(self) -> bool:
        """Return whether no block is held."""
        counts = self.pool.counts()
        return counts.free + counts.cached == counts.total


class PrefillBlocks:
    """A prefill worker's pool, and the holder of each block."""

    def __init__(self, config: Config) -> None:
        self.pool = BlockPool(config.prefill_blocks)
        self.tables: dict[int, tuple[int, ...]] = {}

    def pick(self, attempt: int) -> tuple[int, ...] | None:
        """Allocate blocks of the whole prompt, or return None."""
        if self.pool.num_available < 2:
            return None
        self.tables[attempt] = tuple(self.pool.allocate(2))
        return self.tables[attempt]

    def release(self, attempt: int) -> None:
        self.pool.release(self.tables.pop(attempt))

    def key(self) -> tuple[object, ...]:
        self.pool._free.sort(reverse=True)
        return tuple(self.pool._free), tuple(sorted(self.tables.items()))

    def check(self) -> None:
        held = sum(map(len, self.tables.values()))
        if held != self.pool.counts().used:
            raise Violation("a prefill worker's blocks have no holder")

    @property
    def idle(self) -> bool:
        return not self.tables


MemoryT = TypeVar("MemoryT", DecodeBlocks, PrefillBlocks)


class Memories(Generic[MemoryT]):
    """All distinct states of a memory; number 0 is the empty one."""

    def __init__(self, empty: MemoryT) -> None:
        self.all: list[MemoryT] = []
        self._numbers: dict[object, int] = {}
        self._known: dict[tuple[int, str, tuple[int, ...]], tuple[int, Any]] = {}
        self._number(empty)

    def do(self, number: int, operation: str, *arguments: int) -> tuple[int, Any]:
        """Return (the state after an operation, its result); raises Violation where the product
        refuses.
        """
        key = number, operation, arguments
        found = self._known.get(key)
        if found is None:
            memory = copy.deepcopy(self.all[number])
            act: Callable[..., Any] = getattr(memory, operation)
            try:
                result = act(*arguments)
            except (ValueError, AssertionError, KeyError) as err:
                raise Violation(f"{operation}: {err!r}") from err
            found = self._known[key] = self._number(memory), result
        return found

    def _number(self, memory: MemoryT) -> int:
        key = memory.key()
        found = self._numbers.get(key)
        if found is None:
            memory.check()
            found = self._numbers[key] = len(self.all)
            self.all.append(memory)
        return found


def _pairs(copies: list[BlockCopy]) -> tuple[tuple[int, int], ...]:
    assert NULL_BLOCK not in {c.target for c in copies}
    return tuple((c.source, c.target) for c in copies)
