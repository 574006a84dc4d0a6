"""The block pool keeps count: no block leaks or is allocated twice, in any order of operations."""

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.engine.kv import NULL_BLOCK, BlockPool

SIZE = 6


def test_evicts_the_least_recently_released_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block, name in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.register(block, name)
    pool.release([blocks[1]])
    pool.release([blocks[0]])
    assert pool.allocate(1) == [blocks[1]]
    assert pool.find(b"b") is None
    assert pool.find(b"a") == blocks[0]


def test_a_hit_saves_a_block_from_eviction() -> None:
    pool = BlockPool(2)
    a, b = pool.allocate(2)
    pool.register(a, b"a")
    pool.register(b, b"b")
    pool.release([a, b])
    pool.share([a])
    pool.release([a])
    assert pool.allocate(1) == [b]


def test_events_are_the_net_change() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.register(block, b"a")
    assert pool.take_events() == ([b"a"], [])
    pool.release([block])
    pool.register(*pool.allocate(1), b"b")
    assert pool.take_events() == ([b"b"], [b"a"])
    pool.release([block])
    pool.release(pool.allocate(1))
    pool.register(*pool.allocate(1), b"b")
    assert pool.take_events() == ([], [])  # evicted and registered again


@pytest.mark.parametrize("reserved", [False, True])
def test_a_double_release_is_refused(reserved: bool) -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1, reserved)
    pool.release(blocks, reserved)
    with pytest.raises(ValueError, match="has no reference to release"):
        pool.release(blocks, reserved)
    with pytest.raises(ValueError, match="is free"):
        pool.share(blocks)
    with pytest.raises(ValueError, match="cannot allocate"):
        pool.allocate(3)
    assert pool.counts().free == 2


class PoolMachine(RuleBasedStateMachine):
    """Holders allocate, share and release blocks at random; a model keeps separate counts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SIZE)
        self.held: list[tuple[list[int], bool]] = []
        self.names = 0
        self.known: dict[bytes, int] = {}
        self.published: set[bytes] = set()

    @rule(count=st.integers(1, 3), reserved=st.booleans())
    def allocate(self, count: int, reserved: bool) -> None:
        if count > self.pool.num_available:
            with pytest.raises(ValueError):
                self.pool.allocate(count)
            return
        evicts = count > self.pool.counts().free
        event("eviction" if evicts else "no eviction")
        blocks = self.pool.allocate(count, reserved)
        others = {b for held, _ in self.held for b in held}
        assert not others & set(blocks)
        assert len(set(blocks)) == count
        assert NULL_BLOCK not in blocks
        self.held.append((blocks, reserved))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks, reserved = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(blocks, reserved)

    @precondition(lambda self: any(reserved for _, reserved in self.held))
    @rule()
    def commit(self) -> None:
        at = next(i for i, (_, reserved) in enumerate(self.held) if reserved)
        self.pool.commit(self.held[at][0])
        self.held[at] = (self.held[at][0], False)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        blocks, _ = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        self.names += 1
        self.pool.register(blocks[0], b"%d" % self.names)
        if self.pool.find(b"%d" % self.names) is not None:
            self.known[b"%d" % self.names] = blocks[0]

    @precondition(lambda self: self.known)
    @rule(data=st.data(), reserved=st.booleans())
    def share(self, data: st.DataObject, reserved: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        found = self.pool.find(name)
        if found is None:
            del self.known[name]
            return
        assert found == self.known[name]
        self.pool.share([found], reserved)
        self.held.append(([found], reserved))
        assert not self.pool.writable(found)

    @rule()
    def drain_events(self) -> None:
        added, removed = self.pool.take_events()
        assert not self.published & set(added)
        assert self.published >= set(removed)
        self.published = (self.published | set(added)) - set(removed)
        findable = {name for name in self.known if self.pool.find(name) is not None}
        assert self.published == findable

    @invariant()
    def adds_up(self) -> None:
        counts = self.pool.counts()
        used = {b for blocks, reserved in self.held if not reserved for b in blocks}
        only_reserved = {b for blocks, reserved in self.held if reserved for b in blocks} - used
        assert counts.total == SIZE
        assert counts.used == len(used)
        assert counts.reserved == len(only_reserved)
        assert self.pool.num_available == SIZE - len(used) - len(only_reserved)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)
