"""Index of the KV blocks in the workers' prefix caches, built from the events that workers report.

The index may know fewer blocks than a worker has, but not more: a gap in a worker's sequence of
events means that removals were lost, so all blocks of the worker are dropped. Only half of each
hash is kept, so an unknown block is mistaken for a known one once in 2**58 lookups; the decode
worker then computes the block that turns out to be missing.

All workers share one table, so a prompt is looked up once for all of them, and a block takes the
same 20 to 30 bytes however many workers have it. When the table is full, it becomes a sample: it
keeps only the blocks whose hashes end in one zero bit, later in two, and so on. Of a prompt, all
blocks up to the last one found in the sample count as cached. The table holds at most MAX_SETS
different sets of workers that share blocks; if a block needs yet another set, some of its workers
are left out.
"""

from collections.abc import Iterable, Sequence
from struct import Struct

from pdserve.protos.fleet_pb2 import PrefixEvents

HASH_BYTES = 16
KEPT_BYTES = 8  # of a hash
ENTRIES = 16  # in a bucket, if the table is full
MAX_INDEXED_BLOCKS = 4 << 20
MAX_SETS = 1 << 15  # 200 bytes each; forgetting a worker scans all of them in 15 ms
MAX_SAMPLE_BITS = 8
SWEPT_AT_ONCE = 8  # buckets, for each new block of a full table
_SET = Struct("<I")  # the number of a set of workers
_LAST_AND_SET = Struct(f"<{KEPT_BYTES - 1}xBI")  # of an entry: the last byte of its hash, its set
_ENTRY = _LAST_AND_SET.size


class PrefixIndex:
    """The blocks that workers have in their prefix caches: the chain hashes of full blocks, at most
    `capacity` different ones, each with the set of workers that have the block.

    The table consists of buckets, each one bytes object. An entry in a bucket is the kept half of a
    block's hash and the number of the set of workers that have the block. A set of workers is an
    integer with one bit for each worker.
    """

    def __init__(self, capacity: int = MAX_INDEXED_BLOCKS) -> None:
        self._capacity = capacity
        self._buckets = [b""] * (capacity // ENTRIES + 1)
        self._sets = _WorkerSets()
        self._incarnations: dict[int, bytes] = {}  # of the present workers, by their bits
        self._used_bits = 0  # the bits in `_incarnations`
        self._num_entries = 0
        self._num_dead = 0  # entries whose workers are all forgotten
        self._sample_mask = 0  # these bits are zero in the last byte of each hash looked up
        self._next_swept = 0  # bucket
        self._num_to_thin = 0  # buckets that may hold entries outside the sample
        self.num_left_out = 0  # workers of blocks not recorded for lack of room, in total
        self.num_gaps = 0  # in sequences of workers, in total

    def __len__(self) -> int:
        """Number of different blocks in the index that at least one worker has."""
        return self._num_entries - self._num_dead

    @property
    def num_sets(self) -> int:
        """Number of different sets of workers that the index has in use."""
        return self._sets.num_used

    @property
    def sampled_share(self) -> float:
        """Share of all blocks that the index keeps: 1 while there is room for all, halved each time
        that the table is full."""
        return 1 / (self._sample_mask + 1)

    def open(self, incarnation: bytes) -> "WorkerPrefixes":
        """Add a worker to the index. Returns the worker's part of the index, to be closed with its
        `close` when the worker is gone."""
        bit = ~self._used_bits & (self._used_bits + 1)
        self._used_bits |= bit
        self._incarnations[bit] = incarnation
        return WorkerPrefixes(self, bit)

    def close(self, bit: int) -> None:
        """Remove a worker that is gone from the index. `bit`: the worker's bit in sets of
        workers."""
        self.forget(bit)
        self._used_bits &= ~bit
        del self._incarnations[bit]

    def add(self, bit: int, hashes: Iterable[bytes]) -> int:
        """Record that a worker has the blocks with these chain hashes. `bit`: the worker's bit in
        sets of workers. Returns how many of the blocks the worker was not known to have."""
        num_new = 0
        for chain in hashes:
            if self._out_of_date:
                self._sweep()
            if chain[-1] & self._sample_mask:
                continue
            number, position, bucket = self._find(chain)
            if position >= 0:
                holders = self._sets.workers[number]
                if not self._sets.has_room(holders | bit):
                    self.num_left_out += 1
                    continue
                self._num_dead -= not holders
                num_new += not holders & bit
                self._set_number(number, position, bucket, self._sets.move(number, holders | bit))
            elif self._make_room(chain):
                self._num_entries += 1
                num_new += 1
                entry = chain[KEPT_BYTES:] + _SET.pack(self._sets.enter(bit))
                self._buckets[bucket] += entry
        return num_new

    def remove(self, bit: int, hashes: Iterable[bytes]) -> int:
        """Record that a worker no longer has the blocks with these chain hashes. `bit`: the
        worker's bit in sets of workers. Returns how many of the blocks the worker was known to
        have."""
        num_removed = 0
        for chain in hashes:
            number, position, bucket = self._find(chain)
            holders = self._sets.workers[number] if position >= 0 else 0
            if not holders & bit:
                continue
            num_removed += 1
            remaining = holders & ~bit
            if remaining and not self._sets.has_room(remaining):
                self.num_left_out += remaining.bit_count() - 1
                remaining &= -remaining  # keep one of them
            if remaining:
                self._set_number(number, position, bucket, self._sets.move(number, remaining))
            else:
                self._remove_entry(number, position, bucket)
        return num_removed

    def forget(self, bit: int) -> None:
        """Drop all blocks of a worker, which stays in the index. Blocks that no other worker has
        keep their entries until a later sweep removes them. `bit`: the worker's bit in sets of
        workers."""
        self._num_dead += self._sets.forget(bit)
        if not len(self):
            self._sample_mask = self._num_to_thin = 0

    def num_cached(self, hashes: Sequence[bytes]) -> dict[bytes, int]:
        """Return how many of a prompt's first blocks each worker has cached, by the worker's
        incarnation; workers without any are absent. `hashes`: chain hashes of the prompt's
        blocks."""
        num_blocks: dict[bytes, int] = {}
        holders, num_known = self._used_bits, 0
        for num, chain in enumerate(hashes, 1):
            if chain[-1] & self._sample_mask:
                continue
            remaining = holders & self._holders(chain)
            if num_known and remaining != holders:
                self._record(holders & ~remaining, num_known, num_blocks)
            holders, num_known = remaining, num
            if not holders:
                break
        if num_known:
            self._record(holders, num_known, num_blocks)
        return num_blocks

    def _record(self, workers: int, num_blocks: int, result: dict[bytes, int]) -> None:
        """Store `num_blocks` in `result` for each worker in the set `workers`, by the worker's
        incarnation."""
        while workers:
            bit = workers & -workers
            result[self._incarnations[bit]] = num_blocks
            workers ^= bit

    def _holders(self, chain: bytes) -> int:
        number, position, _ = self._find(chain)
        return self._sets.workers[number] if position >= 0 else 0

    def _find(self, chain: bytes) -> tuple[int, int, int]:
        """Look up a block by its chain hash. Returns the number of the set of workers that have the
        block, the position of the block's entry in its bucket (-1 if the block is unknown), and the
        bucket."""
        bucket = hash(chain) % len(self._buckets)  # seeded per process: clients cannot target one
        entries, half_hash = self._buckets[bucket], chain[KEPT_BYTES:]
        position = entries.find(half_hash)
        while position > 0 and position % _ENTRY:  # a match across two entries
            position = entries.find(half_hash, position + 1)
        number = _SET.unpack_from(entries, position + KEPT_BYTES)[0] if position >= 0 else 0
        return number, position, bucket

    def _set_number(self, old_number: int, position: int, bucket: int, new_number: int) -> None:
        if new_number != old_number:
            entries, position = self._buckets[bucket], position + KEPT_BYTES
            self._buckets[bucket] = (
                entries[:position] + _SET.pack(new_number) + entries[position + _SET.size :]
            )

    def _remove_entry(self, number: int, position: int, bucket: int) -> None:
        self._sets.leave(number)
        self._num_entries -= 1
        entries = self._buckets[bucket]
        self._buckets[bucket] = entries[:position] + entries[position + _ENTRY :]

    @property
    def _out_of_date(self) -> bool:
        """Whether the table has entries that `_sweep` must remove or renumber."""
        return bool(self._sets.stale or self._num_to_thin)

    def _make_room(self, chain: bytes) -> bool:
        """Return whether the table has room for a new block. If it is full, sweeps its out-of-date
        entries; if it has no such entries, halves the sample of blocks that it keeps."""
        is_full = self._num_entries >= self._capacity and not self._out_of_date
        if is_full and self._sample_mask + 1 < 1 << MAX_SAMPLE_BITS:
            self._sample_mask = 2 * self._sample_mask + 1
            self._num_to_thin = len(self._buckets)
        for _ in range(SWEPT_AT_ONCE):
            if self._num_entries < self._capacity or not self._out_of_date:
                break
            self._sweep()
        return self._num_entries < self._capacity and not chain[-1] & self._sample_mask

    def _sweep(self) -> None:
        """Clean the next bucket of the table: remove the entries of blocks that no worker has or
        that are outside the sample, and renumber entries if two numbers mean the same set of
        workers."""
        bucket = self._next_swept
        self._next_swept = (bucket + 1) % len(self._buckets)
        self._num_to_thin = max(0, self._num_to_thin - 1)
        entries = list(_LAST_AND_SET.iter_unpack(self._buckets[bucket]))
        for index, (last, number) in reversed(list(enumerate(entries))):
            holders = self._sets.workers[number]
            if not holders or last & self._sample_mask:
                self._num_dead -= not holders
                self._remove_entry(number, index * _ENTRY, bucket)
            elif number in self._sets.stale:
                self._set_number(number, index * _ENTRY, bucket, self._sets.rename(number))


class WorkerPrefixes:
    """One worker's part of a PrefixIndex: the blocks that the worker is known to have cached."""

    def __init__(self, index: PrefixIndex, bit: int) -> None:
        self.bit = bit
        self._index = index
        self._num_known = 0
        self._next: int | None = None  # sequence number of the next message

    def __len__(self) -> int:
        """Number of blocks that the worker is known to have; may be too high once the index is
        full."""
        return self._num_known

    def apply(self, events: PrefixEvents) -> bool:
        """Apply one message of the worker about blocks added to and removed from its prefix cache.
        A message with sequence number s and n hashes is followed by number s + n. Returns False if
        a message before this one is missing: all earlier blocks of the worker are dropped, and it
        must send its whole state again."""
        gap = not events.reset and self._next not in (None, events.sequence)
        if gap or events.reset:
            self._forget()
            self._index.num_gaps += gap
        self._next = events.sequence + len(events.added) + len(events.removed)
        self._num_known += self._index.add(self.bit, _hashes(events.added))
        self._num_known -= self._index.remove(self.bit, _hashes(events.removed))
        return not gap

    def close(self) -> None:
        """Remove the worker, which is gone, from the index."""
        self._index.close(self.bit)

    def _forget(self) -> None:
        if self._num_known:
            self._index.forget(self.bit)
            self._num_known = 0


class _WorkerSets:
    """The sets of workers that entries of a PrefixIndex refer to by number. Each set is kept once,
    with the number of its entries."""

    def __init__(self) -> None:
        self.workers: list[int] = []  # by number
        self._num_entries: list[int] = []
        self._numbers: dict[int, int] = {}
        self._free: list[int] = []
        self.stale: set[int] = set()  # numbers of the empty set, and duplicates

    def has_room(self, workers: int) -> bool:
        """Return whether an index entry may refer to the set `workers`: there is room for one more
        set, the set exists already, or it has only one worker."""
        return self.num_used < MAX_SETS or workers in self._numbers or not workers & (workers - 1)

    @property
    def num_used(self) -> int:
        """Number of sets that index entries refer to."""
        return len(self.workers) - len(self._free)

    def enter(self, workers: int) -> int:
        """Count one more index entry that refers to the set `workers`, which is added if it is new.
        Returns the number of the set."""
        number = self._numbers.get(workers)
        if number is None:
            number = self._numbers[workers] = self._new(workers)
        self._num_entries[number] += 1
        return number

    def leave(self, number: int) -> None:
        """Count one index entry less that refers to set `number`; a set without entries is
        removed."""
        self._num_entries[number] -= 1
        if not self._num_entries[number]:
            if self._numbers.get(self.workers[number]) == number:
                del self._numbers[self.workers[number]]
            self._free.append(number)
            self.stale.discard(number)

    def move(self, number: int, workers: int) -> int:
        """Move an index entry from set `number` to the set `workers`. Returns the number of the
        latter."""
        if self.workers[number] == workers:
            return number
        new_number = self.enter(workers)
        self.leave(number)
        return new_number

    def rename(self, number: int) -> int:
        """Move an index entry from `number` to the number that new entries of the same set of
        workers use. Returns that number."""
        new_number = self._numbers.setdefault(self.workers[number], number)
        if new_number == number:
            self.stale.discard(number)
        else:
            self._num_entries[new_number] += 1
            self.leave(number)
        return new_number

    def forget(self, bit: int) -> int:
        """Remove a worker from every set. Returns how many index entries thereby refer to an empty
        set."""
        num_dead = 0
        for number, workers in enumerate(self.workers):
            if workers & bit:
                self.workers[number] = workers & ~bit
                num_dead += self._num_entries[number] if workers == bit else 0
        # Of sets that are now equal, one gets the new entries.
        used_numbers = [number for number, count in enumerate(self._num_entries) if count]
        self._numbers = {self.workers[n]: n for n in used_numbers if self.workers[n]}
        self.stale = {n for n in used_numbers if self._numbers.get(self.workers[n]) != n}
        return num_dead

    def _new(self, workers: int) -> int:
        if self._free:
            number = self._free.pop()
            self.workers[number] = workers
            return number
        self.workers.append(workers)
        self._num_entries.append(0)
        return len(self.workers) - 1


def _hashes(received: Iterable[bytes]) -> list[bytes]:
    return [chain for chain in received if len(chain) == HASH_BYTES]
