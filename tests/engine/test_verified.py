"""Blocks that are cached while a reservation still holds them: not too early, not twice, and never
lost.

A shadow copy records what every layer of every block holds. Each block in the prefix cache must be
whole, and its tokens and all before them must give its hash in every layer.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from random import Random

import pytest
from builders.engine_kit import ask, assert_at_rest
from fakes.decoder import FakeDecoder
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.api import ContextLengthExceeded
from pdserve.engine.engine import Engine
from pdserve.engine.handoff.protocol import Bitmap, Piece, cut
from pdserve.engine.kv import KvIdentity, KvSpec, LayerGroup, cache_seed, chain_hashes, pool_sizes
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.scheduling import EngineLimits, Reservation
from pdserve.kernels import reference

SIZE = 4
SEED = cache_seed(b"test", b"")
FULL = LayerGroup((0, 1), "full", 0, 1, 4, "float32", 0, 1)


def make_engine(num_blocks: int, window: int) -> Engine:
    groups = [FULL]
    if window:
        groups.append(LayerGroup((2, 3), "window", window, 1, 4, "float32", 0, 1))
    spec = KvSpec(SIZE, tuple(groups))
    limits = EngineLimits(
        vocab_size=64,
        context_len=256,
        block_size=SIZE,
        num_blocks=num_blocks,
        max_running=8,
        chunk_size=16,
    )
    kv = KvCache(spec, pool_sizes(spec, num_blocks, limits.max_running, limits.chunk_size))
    return Engine(FakeDecoder(spec), kv, limits, reference, kv_identity=KvIdentity(b"test"))


@dataclass
class Receiving:
    """A hand-off in progress: received data and missing pieces."""

    reservation: Reservation
    ids: tuple[int, ...]
    bitmap: Bitmap
    pieces: list[Piece]
    cached: int = 0


@dataclass
class Cluster:
    """One decode engine under random hand-offs."""

    engine: Engine
    random: Random
    reached: Counter[str]
    open: list[Receiving] = field(default_factory=list)
    committed: list[str] = field(default_factory=list)
    held: dict[tuple[int, int, int], tuple[int, ...]] = field(default_factory=dict)
    left_behind: set[bytes] = field(default_factory=set)  # hashes of released reservations
    published: dict[int, set[bytes]] = field(default_factory=lambda: defaultdict(set))  # by group
    num_requests: int = 0

    def reserve(self) -> None:
        start, length = self.random.choice([0, 0, 1]), self.random.randint(2, 40)
        ids = tuple((start + i) % 50 for i in range(length))
        self.num_requests += 1
        request = ask(f"r{self.num_requests}", ids, n=self.random.choice([1, 1, 3]), max_tokens=1)
        findable = self.findable().keys()
        try:
            reservation = self.engine.reserve(request)
        except ContextLengthExceeded:
            return
        if reservation is None:
            self.reached["no room"] += 1
            return
        self.reached["evicted"] += bool(findable - self.findable().keys())
        hashes = chain_hashes(ids[:-1], SIZE, SEED)
        hit = -(-reservation.cached_tokens // SIZE)
        self.reached["found what was left behind"] += any(
            h in self.left_behind for h in hashes[:hit]
        )
        self.reached["found what is still being received"] += any(
            h in chain_hashes(other.ids[: other.cached], SIZE, SEED)
            for other in self.open
            for h in hashes[:hit]
        )
        (sequence,) = reservation.job.sequences
        for group, table in enumerate(sequence.block_tables):
            for block in table[reservation.cached_tokens // SIZE :]:
                for layer in range(2):
                    self.held.pop((group, layer, block), None)
        spec = self.engine.kv.spec
        bitmap = Bitmap(spec, reservation.num_tokens, reservation.first_block)
        pieces = [
            piece
            for group, first in enumerate(reservation.first_block)
            for piece in cut(spec, group, range(first, len(reservation.blocks[group])), 128)
        ]
        if self.random.random() < 0.7:  # in the order of a prefill worker
            pieces.sort(key=lambda p: p.blocks.start)
        else:
            self.random.shuffle(pieces)
        cached = reservation.cached_tokens // SIZE * SIZE
        self.open.append(Receiving(reservation, ids[:-1], bitmap, pieces, cached))

    def receive(self) -> None:
        """Receive some frames, write them and mark them as verified."""
        one = self.random.choice(self.open)
        if not one.reservation.open:
            return
        for _ in range(self.random.randint(1, 12)):
            if not one.pieces:
                break
            piece = one.pieces.pop(0)
            one.bitmap.add(piece)
            for index in piece.blocks:
                block = one.reservation.blocks[piece.group][index]
                for layer in piece.layers:
                    assert (piece.group, layer, block) not in self.held, "a cell was written twice"
                    self.held[piece.group, layer, block] = one.ids[: (index + 1) * SIZE]
        lead = min(one.reservation.num_tokens, one.bitmap.num_leading * SIZE)
        kept = self.engine.verified(one.reservation, lead)
        assert one.cached <= kept <= max(lead, one.cached)
        self.reached["a prefix grew"] += one.cached < kept
        self.reached["a window kept it back"] += kept < lead // SIZE * SIZE
        self.reached["a gap kept it back"] += lead < self.arrived(one)
        one.cached = kept
        for other in self.open:
            both = min(one.cached, other.cached)
            same = both > 0 and one.ids[:both] == other.ids[:both]
            self.reached["two have verified the same"] += other is not one and same

    def arrived(self, one: Receiving) -> int:
        have = one.bitmap._present[0][0] | ((1 << one.reservation.first_block[0]) - 1)
        return (have.bit_length() - 1) * SIZE

    def end(self) -> None:
        one = self.open.pop(self.random.randrange(len(self.open)))
        grown = one.cached > one.reservation.cached_tokens
        if not one.reservation.open:
            self.engine.release(one.reservation)
        elif one.bitmap.complete:
            self.engine.commit(one.reservation)
            self.committed.append(one.reservation.key)
            self.reached["committed"] += 1
            self.reached["committed after verified"] += grown
        else:
            self.engine.release(one.reservation)
            self.reached["released"] += 1
            self.reached["released after verified"] += grown
            self.left_behind |= set(chain_hashes(one.ids[: one.cached], SIZE, SEED))

    def abort(self) -> None:
        one = self.random.choice(self.open)
        if one.reservation.open:
            self.reached["aborted after verified"] += one.cached > one.reservation.cached_tokens
            self.engine.abort(one.reservation.key)
            with pytest.raises(ValueError, match="is aborted"):
                self.engine.verified(one.reservation, 0)

    def finish(self) -> None:
        """End a committed request before its first step."""
        self.engine.abort(self.committed.pop())

    def findable(self, group: int = 0) -> dict[bytes, int]:
        """Return every block that can be found, by chain hash, according to the pool's events."""
        pool, known = self.engine.jobs.tables.pools[group], self.published[group]
        added, removed = pool.take_events()
        assert not known & set(added)
        assert known >= set(removed)
        known.update(added)
        known.difference_update(removed)
        found = {chain_hash: pool.find(chain_hash) for chain_hash in known}
        return {chain_hash: block for chain_hash, block in found.items() if block is not None}

    def check(self) -> None:
        known: dict[tuple[int, ...], bytes] = {}
        jobs = self.engine.jobs.by_key.values()
        for group, pool in enumerate(self.engine.jobs.tables.pools):
            counts = pool.counts()
            assert counts.free + counts.used + counts.cached + counts.reserved == pool.num_blocks
            tables = [s.block_tables[group] for job in jobs for s in job.sequences]
            in_tables = {block for table in tables for block in table if block}
            assert counts.used + counts.reserved == len(in_tables)
            findable = self.findable(group)
            assert findable.keys() == self.published[group], "a published block cannot be found"
            found = set(findable.values())
            assert len(found) == len(findable)
            assert counts.cached == len(found - in_tables), "a cached block cannot be found"
            used, reserved = pool.references()
            for block, count in (used + reserved).items():
                assert pool.writable(block) == (count == 1 and block not in found)
            for chain_hash, block in findable.items():
                for layer in range(2):
                    ids = self.held[group, layer, block]  # KeyError: cached before it arrived
                    assert len(ids) % SIZE == 0, "a partial block was cached"
                    if ids not in known:
                        known[ids] = chain_hashes(ids, SIZE, SEED)[-1]
                    assert known[ids] == chain_hash

    def close(self) -> None:
        while self.open:
            self.end()
        while self.committed:
            self.finish()
        self.check()
        assert_at_rest(self.engine)


REACHED: Counter[str] = Counter()


@settings(max_examples=250)
@given(
    window=st.sampled_from([0, 0, 6, 14]),
    num_blocks=st.integers(11, 30),
    num_steps=st.integers(20, 80),
    seed=st.integers(0, 1 << 32),
)
def check_any_order(window: int, num_blocks: int, num_steps: int, seed: int) -> None:
    random = Random(seed)
    cluster = Cluster(make_engine(num_blocks, window), random, REACHED)
    for _ in range(num_steps):
        actions = [cluster.reserve] if len(cluster.open) < 3 else []
        if cluster.open:
            actions += [cluster.receive] * 6 + [cluster.end]
            actions += [cluster.abort] if random.random() < 0.3 else []
        if len(cluster.committed) > 1:
            actions += [cluster.finish]
        random.choice(actions)()
        cluster.check()
    cluster.close()


def test_random_orders_keep_cache_and_block_counts_consistent() -> None:
    REACHED.clear()
    check_any_order()
    print(dict(sorted(REACHED.items())))
    for state in (
        "a gap kept it back",
        "a prefix grew",
        "a window kept it back",
        "aborted after verified",
        "committed after verified",
        "evicted",
        "found what is still being received",
        "found what was left behind",
        "no room",
        "released after verified",
        "two have verified the same",
    ):
        assert REACHED[state] >= 20, state


def test_a_verified_prefix_is_found_before_and_after_its_release() -> None:
    engine = make_engine(40, 0)
    reservation = engine.reserve(ask("a", range(33)))
    assert reservation is not None
    assert engine.verified(reservation, 19) == 16, "only whole blocks may count"
    assert engine.verified(reservation, 8) == 16, "cached blocks must stay cached"
    assert len(engine.take_prefix_events()[0]) == 4
    blocks = engine.stats().blocks
    assert (blocks.cached, blocks.reserved) == (0, 9), "the reservation holds them"
    twin = engine.reserve(ask("b", range(33)))
    assert twin is not None
    assert twin.cached_tokens == 16
    assert twin.blocks[0][:4] == reservation.blocks[0][:4]
    engine.release(reservation)
    blocks = engine.stats().blocks
    assert (blocks.cached, blocks.reserved) == (0, 9), "the other reservation holds them"
    engine.release(twin)
    assert engine.stats().blocks.cached == 4
    assert engine.take_prefix_events() == ([], [])
    assert_at_rest(engine)


def test_only_an_open_reservation_can_be_verified_up_to_its_end() -> None:
    engine = make_engine(40, 0)
    reservation = engine.reserve(ask("a", range(33)))
    assert reservation is not None
    with pytest.raises(ValueError, match="cannot verify 33 tokens: the reservation has 32"):
        engine.verified(reservation, 33)
    engine.release(reservation)
    with pytest.raises(ValueError, match="is released"):
        engine.verified(reservation, 4)


def test_a_window_group_without_its_blocks_prevents_caching() -> None:
    engine = make_engine(40, 6)
    reservation = engine.reserve(ask("a", range(33)))
    assert reservation is not None
    assert reservation.first_block == [0, 6]
    assert engine.verified(reservation, 28) == 0, "the next token would need block 5"
    assert engine.verified(reservation, 32) == 32
    engine.release(reservation)
    again = engine.reserve(ask("b", range(33)))
    assert again is not None
    assert again.cached_tokens == 32
    engine.release(again)
    assert_at_rest(engine)
