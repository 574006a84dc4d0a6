"""Index of the blocks in workers' prefix caches, as reported by their events.

The index may know less than the workers have, but not more: a gap in a worker's sequence means lost
removals, so all blocks of the worker are dropped. Only half of each hash is kept, so an unknown
block is mistaken for a known one once in 2**58 lookups; decode then computes what it turns out to
lack.

All workers share one table, so a prompt is looked up once for all of them, and a block takes the
same 20 to 30 bytes however many have it. A full table keeps only the blocks whose hashes end in a
zero bit, then two, and so on; of a prompt, the blocks up to the last of these count as cached. At
most MAX_SETS different sets of workers share blocks; for a block with yet another set, not every
worker is known.
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
    """The chain hashes of all workers' full blocks, at most `capacity` different ones.

    A bucket is one bytes object. Each entry in it is the kept half of a hash and the number of the
    set of workers that have the block. A set is an integer, in which a worker is a bit.
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
        """Number of different blocks known."""
        return self._num_entries - self._num_dead

    @property
    def num_sets(self) -> int:
        """Number of sets of workers in use."""
        return self._sets.num_used

    @property
    def sampled_share(self) -> float:
        """Share of all blocks that the index keeps; 1 if there is room for all."""
        return 1 / (self._sample_mask + 1)

    def open(self, incarnation: bytes) -> "WorkerPrefixes":
        """Add a worker. Returns its part of the index; `close` that when the worker is gone."""
        bit = ~self._used_bits & (self._used_bits + 1)
        self._used_bits |= bit
        self._incarnations[bit] = incarnation
        return WorkerPrefixes(self, bit)

    def close(self, bit: int) -> None:
        """Forget a worker."""
        self.forget(bit)
        self._used_bits &= ~bit
        del self._incarnations[bit]

    def add(self, bit: int, hashes: Iterable[bytes]) -> int:
        """Add blocks of a worker. Returns how many of them are new for it."""
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
        """Remove blocks of a worker. Returns how many of them were known for it."""
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
        """Drop everything known of a worker. A later sweep removes the entries of its blocks."""
        self._num_dead += self._sets.forget(bit)
        if not len(self):
            self._sample_mask = self._num_to_thin = 0

    def num_cached(self, hashes: Sequence[bytes]) -> dict[bytes, int]:
        """Return how many leading blocks of a prompt are cached, by incarnation of each worker with
        any."""
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
        """Set the number of blocks of each of the workers in `result`."""
        while workers:
            bit = workers & -workers
            result[self._incarnations[bit]] = num_blocks
            workers ^= bit

    def _holders(self, chain: bytes) -> int:
        number, position, _ = self._find(chain)
        return self._sets.workers[number] if position >= 0 else 0

    def _find(self, chain: bytes) -> tuple[int, int, int]:
        """Return the set of a block's workers, the position of its entry in the bucket (-1:
        absent), and the bucket."""
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
        """Whether `_sweep` has entries to remove or rename."""
        return bool(self._sets.stale or self._num_to_thin)

    def _make_room(self, chain: bytes) -> bool:
        """Return whether a new block fits. Sweeps a full table; if nothing in it is out of date,
        halves the sample of blocks that it keeps."""
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
        """Clean the next bucket: remove entries without workers or outside the sample, and replace
        duplicate numbers of one set."""
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
    """The known blocks of one worker."""

    def __init__(self, index: PrefixIndex, bit: int) -> None:
        self.bit = bit
        self._index = index
        self._num_known = 0
        self._next: int | None = None  # sequence number of the next message

    def __len__(self) -> int:
        """Number of its known blocks; may be too high once the table is full."""
        return self._num_known

    def apply(self, events: PrefixEvents) -> bool:
        """Apply one message. A message with sequence number s and n hashes is followed by number s
        + n. Returns False if a message before it is missing: the worker must send its whole state
        again."""
        gap = not events.reset and self._next not in (None, events.sequence)
        if gap or events.reset:
            self._forget()
            self._index.num_gaps += gap
        self._next = events.sequence + len(events.added) + len(events.removed)
        self._num_known += self._index.add(self.bit, _hashes(events.added))
        self._num_known -= self._index.remove(self.bit, _hashes(events.removed))
        return not gap

    def close(self) -> None:
        """Forget the worker, which is gone."""
        self._index.close(self.bit)

    def _forget(self) -> None:
        if self._num_known:
            self._index.forget(self.bit)
            self._num_known = 0


class _WorkerSets:
    """Sets of workers, each kept once for all entries that refer to it by number."""

    def __init__(self) -> None:
        self.workers: list[int] = []  # by number
        self._num_entries: list[int] = []
        self._numbers: dict[int, int] = {}
        self._free: list[int] = []
        self.stale: set[int] = set()  # numbers of the empty set, and duplicates

    def has_room(self, workers: int) -> bool:
        """Return whether an entry may refer to that set; a set of one worker is always allowed."""
        return self.num_used < MAX_SETS or workers in self._numbers or not workers & (workers - 1)

    @property
    def num_used(self) -> int:
        """The number of sets in use."""
        return len(self.workers) - len(self._free)

    def enter(self, workers: int) -> int:
        """Count one more entry of that set. Returns its number."""
        number = self._numbers.get(workers)
        if number is None:
            number = self._numbers[workers] = self._new(workers)
        self._num_entries[number] += 1
        return number

    def leave(self, number: int) -> None:
        """Count one entry of that set less."""
        self._num_entries[number] -= 1
        if not self._num_entries[number]:
            if self._numbers.get(self.workers[number]) == number:
                del self._numbers[self.workers[number]]
            self._free.append(number)
            self.stale.discard(number)

    def move(self, number: int, workers: int) -> int:
        """Move an index entry from set `number` to set `workers`. Returns the latter's number."""
        if self.workers[number] == workers:
            return number
        new_number = self.enter(workers)
        self.leave(number)
        return new_number

    def rename(self, number: int) -> int:
        """Move an entry to the number that new entries of its set use. Returns that number."""
        new_number = self._numbers.setdefault(self.workers[number], number)
        if new_number == number:
            self.stale.discard(number)
        else:
            self._num_entries[new_number] += 1
            self.leave(number)
        return new_number

    def forget(self, bit: int) -> int:
        """Take a worker out of every set. Returns how many entries thereby refer to an empty
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
