"""Allocates KV blocks to sequences in every layer group at once: in all groups, or in none if one
of them lacks blocks. Pure.

A new sequence gets blocks for its whole prompt in layer groups with full attention. In a group with
sliding-window attention it gets only the blocks for one chunk and the window before it; as the
window moves on, it releases the blocks that the window has passed and gets as many for later
tokens. So the pool of a window group may be smaller (spec.pool_sizes). A passed block that other
sequences share stays allocated until the window of each of them has passed it too; the sequence may
have to wait for new blocks until then.

Only the JobTable calls the methods that allocate or free blocks; its docstring says who frees
which. Only one sequence writes a block: a block that is shared or in the prefix cache is copied
before the first write (`BlockCopy`). Copies run in order, before any other write. The reference to
a copy's source is released at once: the next owner of that block writes it after the copy.
"""

from collections.abc import Sequence as Seq

from pdserve.engine.kv import (
    NULL_BLOCK,
    BlockCopy,
    BlockPool,
    KvSpec,
    blocks_for,
    chain_hashes,
    next_hash,
    window_blocks,
)
from pdserve.engine.scheduling.request_state import Sequence


class BlockTables:
    """The KV block pools of an engine, one per layer group, and the operations that give their
    blocks to sequences. Group g has `num_blocks[g]` blocks. `chunk_size`: maximum number of a
    sequence's tokens that one step computes."""

    def __init__(
        self, spec: KvSpec, num_blocks: Seq[int], chunk_size: int, caching: bool = True
    ) -> None:
        self.block_size = spec.block_size
        self.caching = caching
        self.windows = [g.window if g.kind == "window" else 0 for g in spec.groups]
        self._chunk_size = chunk_size
        # The group that stats and prefix events report: the first with full attention.
        self.main_group = self.windows.index(0) if 0 in self.windows else 0
        self._has_windows = any(self.windows)
        self.pools = [BlockPool(count) for count in num_blocks]
        self._zeros = (0,) * len(spec.groups)  # a number for each group

    @property
    def main_pool(self) -> BlockPool:
        """The block pool of the main layer group, the first with full attention, which statistics
        report."""
        return self.pools[self.main_group]

    def hashes(self, ids: Seq[int], seed_hash: bytes) -> list[bytes]:
        """Return the chain hashes of the full blocks of `ids`; empty if the prefix cache is
        disabled."""
        return chain_hashes(ids, self.block_size, seed_hash) if self.caching else []

    def num_found(self, chain: Seq[bytes]) -> int:
        """Return how many blocks at the start of a chain, given by their hashes, are in the main
        group's prefix cache."""
        missing = (index for index, link in enumerate(chain) if self.main_pool.find(link) is None)
        return next(missing, len(chain))

    def take_prefix_events(self) -> tuple[list[bytes], list[bytes]]:
        """Return the chain hashes that the main group's prefix cache has gained and lost since the
        last call, as (added, removed). A hash that was both added and removed appears in
        neither."""
        for pool in self.pools:
            if pool is not self.main_pool:
                pool.take_events()
        return self.main_pool.take_events()

    def match(self, hashes: Seq[bytes], limit: int) -> int:
        """Return for how many leading tokens, at most `limit`, the prefix cache holds the KV.
        Groups with full attention must hold every block of these tokens; window groups only the
        blocks that the token after them attends to."""
        max_hit = min(len(hashes), blocks_for(limit, self.block_size))
        for pool, window in zip(self.pools, self.windows, strict=True):
            if not window:
                max_hit = next((i for i in range(max_hit) if pool.find(hashes[i]) is None), max_hit)
        for hit in range(max_hit, 0, -1):
            if all(
                pool.find(hashes[i]) is not None
                for pool, window in zip(self.pools, self.windows, strict=True)
                if window
                for i in range(self.first_seen(min(hit * self.block_size, limit), window), hit)
            ):
                return min(hit * self.block_size, limit)
        return 0

    def first_seen(self, position: int, window: int) -> int:
        """Return the index of the first block that a token at `position` or later attends to;
        `window` is the layer group's window in tokens, or 0 for full attention."""
        return max(0, position - window + 1) // self.block_size if window else 0

    def needed_at_once(self, num_blocks: int, window: int) -> int:
        """Return how many blocks must be allocated at once to a sequence that will fill
        `num_blocks` blocks: all with full attention (`window` 0), otherwise at most those of one
        chunk and its window."""
        if not window:
            return num_blocks
        return min(num_blocks, window_blocks(window, self._chunk_size, self.block_size))

    def open(
        self,
        sequence: Sequence,
        hashes: Seq[bytes],
        num_cached: int,
        spare: Seq[int] = (),
        reserved: bool = False,
    ) -> list[BlockCopy] | None:
        """Allocate the first blocks of a new sequence; its first `num_cached` tokens use blocks of
        the prefix cache.

        With `reserved`, for KV that a prefill worker sends, the sequence gets blocks for all its
        ids at once, but in window groups only those that its last token attends to, because this
        engine computes none of the other tokens. A cached block that also holds tokens after the
        first `num_cached` is copied; returns the copies to make. Returns None and changes nothing
        if that would leave fewer than `spare[g]` available blocks in the pool of any group g.
        """
        size = self.block_size
        total = blocks_for(len(sequence.ids), size)
        hit = blocks_for(num_cached, size)
        copied = num_cached % size != 0
        next_token = len(sequence.ids) - 1 if reserved else num_cached
        groups: list[tuple[int, list[int], int]] = []  # null blocks, cached ones, how many new
        for pool, window, num_spare in zip(
            self.pools, self.windows, spare or self._zeros, strict=True
        ):
            first = self.first_seen(next_token, window)
            blocks = [pool.find(h) for h in hashes[first:hit]]
            shared = [b for b in blocks if b is not None]
            assert len(shared) == max(0, hit - first), (
                "the cache has lost blocks that match() returned"
            )
            num_new = total - max(first, hit) + copied
            if not reserved:
                num_new = self.needed_at_once(num_new, window)
            from_cache = sum(map(pool.is_cached, shared))
            if num_new + from_cache + num_spare > pool.num_available:
                return None
            groups.append((first, shared, num_new))
        copies: list[BlockCopy] = []
        for group, (first, shared, num_new) in enumerate(groups):
            pool = self.pools[group]
            pool.share(shared, reserved)
            new = pool.allocate(num_new, reserved)
            if copied:
                copies.append(BlockCopy(group, shared[-1], new[0]))
                pool.release([shared.pop()], reserved)
            sequence.block_tables.append([NULL_BLOCK] * first + shared + new)
            sequence.rewritten_from.append(0)
            sequence.num_trimmed.append(first)
        sequence.num_computed = num_cached
        sequence.num_published = num_cached // size
        if sequence.num_published:
            sequence.parent_hash = hashes[sequence.num_published - 1]
        return copies

    def extend(self, sequence: Sequence, num_tokens: int) -> list[BlockCopy] | None:
        """Add blocks to a sequence so that it has room for its first `num_tokens` tokens, and make
        the block of the next token to compute writable, by a copy if the block is shared.

        Sets `sequence.writable_to` to the end of that block. Returns the copies to make; returns
        None and changes nothing if a pool has too few blocks.
        """
        total = blocks_for(num_tokens, self.block_size)
        index = sequence.num_computed // self.block_size
        needs: list[tuple[int, bool]] = []
        for pool, table in zip(self.pools, sequence.block_tables, strict=True):
            copied = index < len(table) and not pool.writable(table[index])
            missing = max(0, total - len(table))
            if missing + copied > pool.num_available:
                return None
            needs.append((missing, copied))
        copies: list[BlockCopy] = []
        for group, (missing, copied) in enumerate(needs):
            if not missing and not copied:
                continue
            pool, table = self.pools[group], sequence.block_tables[group]
            start = index if copied else len(table)
            if copied:
                (target,) = pool.allocate(1)
                copies.append(BlockCopy(group, table[index], target))
                pool.release([table[index]])
                table[index] = target
            table.extend(pool.allocate(missing))
            sequence.rewritten_from[group] = min(sequence.rewritten_from[group], start)
        sequence.writable_to = (index + 1) * self.block_size
        return copies

    def fork(self, sequence: Sequence, ids: list[int], choices: tuple[int, ...]) -> Sequence:
        """Return a new sequence that shares all blocks and computed tokens of `sequence` and
        continues with `ids`."""
        sequence.writable_to = 0  # its blocks are shared now
        other = Sequence(sequence.job, ids, choices, sequence.parent_hash)
        other.num_computed = sequence.num_computed
        other.num_published = sequence.num_published
        other.num_trimmed = list(sequence.num_trimmed)
        other.rewritten_from = [0] * len(self.pools)
        other.block_tables = [list(table) for table in sequence.block_tables]
        for pool, table in zip(self.pools, other.block_tables, strict=True):
            pool.share(b for b in table if b != NULL_BLOCK)
        return other

    def advance(self, sequence: Sequence, num_computed: int) -> None:
        """Record that the KV of the sequence's first `num_computed` tokens is computed: add full
        blocks to the prefix cache, and release blocks that the attention window has passed."""
        sequence.num_computed = num_computed
        if (sequence.num_published + 1) * self.block_size <= num_computed:
            self.publish(sequence, num_computed, self._zeros)
        if self._has_windows:
            self._trim(sequence)

    def publish(self, sequence: Sequence, num_tokens: int, first_blocks: Seq[int]) -> None:
        """Add the full blocks of the sequence's first `num_tokens` tokens to the prefix cache, in
        group g only from block `first_blocks[g]` on, because earlier blocks are cached already or
        were never filled."""
        size = self.block_size
        while self.caching and (sequence.num_published + 1) * size <= num_tokens:
            block = sequence.num_published
            ids = sequence.ids[block * size : (block + 1) * size]
            sequence.parent_hash = next_hash(sequence.parent_hash, ids)
            for pool, table, first in zip(
                self.pools, sequence.block_tables, first_blocks, strict=True
            ):
                if table[block] != NULL_BLOCK and block >= first:
                    pool.register(table[block], sequence.parent_hash)
            sequence.num_published += 1

    def commit(self, sequence: Sequence, num_computed: int) -> None:
        """Turn the reserved blocks of a sequence into ordinary ones, which hold the KV of its first
        `num_computed` tokens."""
        for pool, table in zip(self.pools, sequence.block_tables, strict=True):
            pool.commit(b for b in table if b != NULL_BLOCK)
        self.advance(sequence, num_computed)

    def _trim(self, sequence: Sequence) -> None:
        """Release the blocks of a sequence that the attention window has passed, and allocate as
        many for its tokens that have no blocks yet. Allocates fewer if the pool is short because
        others share the released blocks; `extend` allocates the rest later."""
        total = blocks_for(len(sequence.ids), self.block_size)
        for group, window in enumerate(self.windows):
            first = self.first_seen(sequence.num_computed, window)
            trimmed = sequence.num_trimmed[group]
            if first > trimmed:
                pool, table = self.pools[group], sequence.block_tables[group]
                pool.release(table[trimmed:first])
                table[trimmed:first] = [NULL_BLOCK] * (first - trimmed)
                missing = min(first - trimmed, max(0, total - len(table)), pool.num_available)
                table.extend(pool.allocate(missing))
                sequence.num_trimmed[group] = first
                sequence.rewritten_from[group] = min(sequence.rewritten_from[group], trimmed)

    def forget(self, sequence: Sequence) -> None:
        """Remove all blocks of the sequence from the prefix cache."""
        for pool, table in zip(self.pools, sequence.block_tables, strict=True):
            pool.forget(table)

    def close(self, sequence: Sequence, reserved: bool = False) -> None:
        """Release all blocks of a sequence. Of those that stay in the prefix cache, the last is the
        first to be evicted. `reserved`: the blocks belong to a reservation."""
        for pool, table in zip(self.pools, sequence.block_tables, strict=True):
            pool.release([b for b in reversed(table) if b != NULL_BLOCK], reserved)
        sequence.block_tables = []
