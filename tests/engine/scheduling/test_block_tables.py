"""Block tables alone: random sequences of operations, with the contents that each block would have.

A block's content is represented by the token prefix that its KV depends on. So every block that a
table reaches can be compared with the content its sequence should see, after any mixture of hits,
copies and trims.
"""

import random
from collections import Counter

import pytest
from builders.job_kit import SEED_HASH, VOCAB, make_job, prompt_of, spec_of

from pdserve.engine.kv import NULL_BLOCK, BlockCopy, blocks_for, pool_sizes
from pdserve.engine.scheduling import BlockTables, EngineLimits, Sequence

RUNS = 2000
LIMITS = EngineLimits(VOCAB, 64, 2, 1000, 4, 4)


class Bench:
    """Block tables, the sequences that use them, and the contents that steps would have written."""

    def __init__(self, rng: random.Random, reached: Counter[str]) -> None:
        self.rng, self.reached = rng, reached
        self.size = rng.choice((2, 3, 4))
        self.window = rng.choice((0, 0, 3, 6))
        self.chunk = rng.choice((2, 4))
        spec, num_blocks = spec_of(self.size, self.window), rng.randrange(5, 16)
        sizes = pool_sizes(spec, num_blocks, 2, self.chunk)
        self.tables = BlockTables(spec, sizes, self.chunk)
        self.open: list[Sequence] = []
        self.reserved: list[Sequence] = []
        self.content: list[dict[tuple[int, int], tuple[int, ...]]] = [{} for _ in self.tables.pools]

    def copy(self, copies: list[BlockCopy]) -> None:
        self.reached["copies"] += len(copies)
        for one in copies:
            content = self.content[one.group]
            for at in range(self.size):
                content.pop((one.target, at), None)
                if (one.source, at) in content:
                    content[one.target, at] = content[one.source, at]

    def write(self, sequence: Sequence, start: int, end: int) -> None:
        for group, pool in enumerate(self.tables.pools):
            for at in range(start, end):
                block = sequence.block_tables[group][at // self.size]
                if block == NULL_BLOCK:
                    assert self.window, "a block of a full group is missing"
                    continue
                assert pool.writable(block), "a write into a shared block"
                self.content[group][block, at % self.size] = tuple(sequence.ids[: at + 1])

    def begin(self) -> None:
        ids = list(prompt_of(self.rng, self.rng.randrange(2, 24)))
        job = make_job(LIMITS, "job", 0, tuple(ids), max_tokens=1)
        sequence = Sequence(job, ids, (0,), SEED_HASH)
        hashes = self.tables.hashes(ids, SEED_HASH)
        hit = self.tables.match(hashes, len(ids) - 1)
        before = [pool.counts() for pool in self.tables.pools]
        spare = [self.rng.randrange(3) for _ in self.tables.pools]
        reserved = self.rng.random() < 0.3
        copies = self.tables.open(sequence, hashes, hit, spare, reserved)
        if copies is None:
            assert [pool.counts() for pool in self.tables.pools] == before
            assert sequence.block_tables == []
            self.reached["refused"] += 1
            return
        self.reached["hits"] += hit > 0
        self.copy(copies)
        assert all(p.num_available >= s for p, s in zip(self.tables.pools, spare, strict=True))
        assert sequence.num_computed == hit
        (self.reserved if reserved else self.open).append(sequence)

    def compute(self, sequence: Sequence) -> None:
        """Compute a row: the next tokens of the sequence, after appending one if all are
        computed."""
        if sequence.num_left == 0:
            sequence.ids.append(self.rng.randrange(VOCAB))
        most = min(len(sequence.ids), sequence.num_computed + self.chunk)
        end = self.rng.randrange(sequence.num_computed + 1, most + 1)
        before = [list(table) for table in sequence.block_tables]
        counts = [pool.counts() for pool in self.tables.pools]
        own = end <= sequence.writable_to  # the scheduler checks this first
        self.reached["own"] += own
        copies = [] if own else self.tables.extend(sequence, end)
        self.reached["lazy"] += any(len(table) * self.size < end for table in before)
        if copies is None:
            assert sequence.block_tables == before
            assert [pool.counts() for pool in self.tables.pools] == counts
            self.reached["short"] += 1
            return
        self.copy(copies)
        self.write(sequence, sequence.num_computed, end)
        trimmed = list(sequence.num_trimmed)
        self.tables.advance(sequence, end)
        self.reached["trims"] += sequence.num_trimmed != trimmed

    def receive(self, sequence: Sequence) -> None:
        """Receive the KV of a reservation: publish a part first, or abandon it."""
        num = len(sequence.ids) - 1
        hit = blocks_for(sequence.num_computed, self.size)
        first = [
            min(blocks_for(num, self.size), max(hit, self.tables.first_seen(num, window)))
            for window in self.tables.windows
        ]
        for group, start in enumerate(first):
            for at in range(start * self.size, num):
                block = sequence.block_tables[group][at // self.size]
                self.content[group][block, at % self.size] = tuple(sequence.ids[: at + 1])
        full = num // self.size * self.size
        if not self.window and self.rng.random() < 0.5:
            self.tables.publish(sequence, full, first)
            self.reached["published"] += 1
        self.reserved.remove(sequence)
        if self.rng.random() < 0.5:
            self.tables.commit(sequence, num)
            self.open.append(sequence)
            self.reached["committed"] += 1
        else:
            self.tables.close(sequence, reserved=True)

    def fork(self, sequence: Sequence) -> None:
        if not sequence.num_left and len(self.open) < 6:  # a prefix forks after its last row
            ids = [*sequence.ids, self.rng.randrange(VOCAB)]
            self.open.append(self.tables.fork(sequence, ids, (1,)))
            self.reached["forks"] += 1

    def act(self) -> None:
        choice = self.rng.random()
        if choice < 0.25 or not (self.open or self.reserved):
            self.begin()
        elif choice < 0.35 and self.reserved:
            self.receive(self.rng.choice(self.reserved))
        elif not self.open:
            return
        elif choice < 0.75:
            self.compute(self.rng.choice(self.open))
        elif choice < 0.85:
            self.fork(self.rng.choice(self.open))
        elif choice < 0.88:
            self.tables.forget(self.rng.choice(self.open))
            self.reached["forgotten"] += 1
        else:
            sequence = self.open.pop(self.rng.randrange(len(self.open)))
            self.tables.close(sequence)
            assert sequence.block_tables == []

    def check(self, contents: bool) -> None:
        for group, pool in enumerate(self.tables.pools):
            used, reserved = (
                Counter(b for s in found for b in s.block_tables[group] if b != NULL_BLOCK)
                for found in (self.open, self.reserved)
            )
            assert pool.references() == (used, reserved)
            assert pool.counts().total == pool.num_blocks
            window = self.tables.windows[group]
            for sequence in self.open:
                table, content = sequence.block_tables[group], self.content[group]
                first = max(0, sequence.num_computed - window + 1) if window else 0
                trimmed = sequence.num_trimmed[group]
                assert trimmed == self.tables.first_seen(sequence.num_computed, window)
                assert NULL_BLOCK not in table[trimmed:]
                assert not any(table[:trimmed])
                if len(table) < blocks_for(len(sequence.ids) - 1, self.size):
                    assert window, "a full group lacks a block of the prompt"
                    self.reached["part of a prompt"] += 1
                for at in range(first, sequence.num_computed if contents else 0):
                    seen = content[table[at // self.size], at % self.size]
                    assert seen == tuple(sequence.ids[: at + 1]), "KV of another prefix"


def test_random_operations_keep_every_block_and_its_content() -> None:
    reached = Counter[str]()
    for seed in range(RUNS):
        bench = Bench(random.Random(seed), reached)
        for number in range(24):
            bench.act()
            bench.check(contents=number % 4 == 3)
        for sequence in bench.open:
            bench.tables.close(sequence)
        for sequence in bench.reserved:
            bench.tables.close(sequence, reserved=True)
        for pool in bench.tables.pools:
            assert pool.num_available == pool.num_blocks
    kinds = ("hits", "copies", "trims", "forks", "refused", "short", "published", "committed")
    kinds += ("lazy", "part of a prompt")
    assert all(reached[kind] > 100 for kind in (*kinds, "forgotten")), reached


def test_first_block_that_a_window_sees(subtests: pytest.Subtests) -> None:
    for position, block in ((1, 0), (47, 0), (48, 0), (78, 0), (79, 1), (200, 4)):
        with subtests.test(position=position, block=block):
            tables = BlockTables(spec_of(32, 48), (1, 1), 32)
            assert tables.first_seen(position, 48) == block
            oldest = max(0, position - 48 + 1)  # oldest token that `position` attends to
            assert oldest // 32 == block
            assert tables.first_seen(position, 0) == 0, "all of it"
