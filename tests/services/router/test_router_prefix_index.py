"""A router's index of its workers' prefix caches, compared with plain sets of hashes."""

import tracemalloc
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.protos import fleet_pb2 as pb
from pdserve.services.router.fleet import PrefixIndex, prefix_index
from pdserve.services.router.fleet.prefix_index import WorkerPrefixes

HASHES = [bytes([number]) * 16 for number in range(8)]
hashes = st.sampled_from(HASHES)
changes = st.lists(st.tuples(st.lists(hashes, max_size=4), st.lists(hashes, max_size=4)))


def num_cached(index: PrefixIndex, incarnation: bytes, prompt: list[bytes]) -> int:
    return index.num_cached(prompt).get(incarnation, 0)


@given(changes, st.sets(st.integers(0, 30)), st.lists(hashes, max_size=6))
def test_the_index_never_reports_a_missing_block(
    changes: list[tuple[list[bytes], list[bytes]]], dropped: set[int], prompt: list[bytes]
) -> None:
    index, truth, sequence = PrefixIndex(), set[bytes](), 0
    worker = index.open(b"a")
    exact = True
    for number, (added, removed) in enumerate(changes):
        truth = (truth | set(added)) - set(removed)
        if number not in dropped:
            worker.apply(pb.PrefixEvents(sequence=sequence, added=added, removed=removed))
        elif added or removed:
            exact = False
        sequence += len(added) + len(removed)
    hit = num_cached(index, b"a", prompt)
    if exact:
        assert index.num_gaps == 0
        assert len(worker) == len(index) == len(truth)
        assert hit == next((i for i, h in enumerate(prompt) if h not in truth), len(prompt))
    # A gap at the very end is not known before the next message.
    worker.apply(pb.PrefixEvents(sequence=sequence))
    assert set(prompt[: num_cached(index, b"a", prompt)]) <= truth


workers = st.integers(0, 3)
happenings = st.one_of(
    st.tuples(st.just("add"), workers, st.lists(hashes, max_size=6)),
    st.tuples(st.just("remove"), workers, st.lists(hashes, max_size=6)),
    st.tuples(st.just("reset"), workers, st.lists(hashes, max_size=3)),
    st.tuples(st.just("leave"), workers, st.just([])),
)


@given(st.lists(happenings, max_size=60), st.lists(hashes, max_size=6))
def test_several_workers_compared_with_a_set_each(
    happenings: list[tuple[str, int, list[bytes]]], prompt: list[bytes]
) -> None:
    index = PrefixIndex()
    joined: dict[int, WorkerPrefixes] = {}
    truth: dict[int, set[bytes]] = {}
    sequences: dict[int, int] = {}
    for what, name, said in happenings:
        if name not in joined:
            joined[name], truth[name], sequences[name] = index.open(bytes([name])), set(), 0
        worker = joined[name]
        if what == "add":
            worker.apply(pb.PrefixEvents(sequence=sequences[name], added=said))
            truth[name] |= set(said)
        elif what == "remove":
            worker.apply(pb.PrefixEvents(sequence=sequences[name], removed=said))
            truth[name] -= set(said)
        elif what == "reset":
            worker.apply(pb.PrefixEvents(sequence=sequences[name], reset=True, added=said))
            truth[name] = set(said)
        else:
            joined.pop(name).close()
            del truth[name]
        sequences[name] += len(said)
        assert len({worker.bit for worker in joined.values()}) == len(joined)
        assert {name: len(worker) for name, worker in joined.items()} == {
            name: len(known) for name, known in truth.items()
        }
        assert len(index) == len(set().union(*truth.values()))
        expected = {}
        for name, known in truth.items():
            num = next((i for i, h in enumerate(prompt) if h not in known), len(prompt))
            if num:
                expected[bytes([name])] = num
        assert index.num_cached(prompt) == expected


def test_a_full_table_keeps_a_sample_of_all_blocks() -> None:
    index = PrefixIndex(capacity=10)
    one, other = index.open(b"one"), index.open(b"other")
    many = [bytes([number]) * 16 for number in range(50)]
    one.apply(pb.PrefixEvents(sequence=0, added=many[:10]))
    assert (len(index), index.sampled_share) == (10, 1)
    one.apply(pb.PrefixEvents(sequence=10, added=many[10:]))
    sample = many[::8]
    assert (len(index), index.sampled_share) == (len(sample), 1 / 8)
    other.apply(pb.PrefixEvents(sequence=0, added=many[:20]))
    assert len(index) == len(sample), "a block of two workers takes the room of one"
    assert index.num_cached(many) == {b"one": 49, b"other": 17}
    assert index.num_cached(many[1:8]) == {}, "none of them is in the sample"
    one.apply(pb.PrefixEvents(sequence=50, removed=many[24:26]))
    assert index.num_cached(many) == {b"one": 17, b"other": 17}
    one.close()
    other.close()
    assert index.sampled_share == 1


@given(st.integers(1, 400), st.integers(0, 2**32))
def test_a_sample_reports_no_missing_block_and_many_of_the_present_ones(
    capacity: int, seed: int
) -> None:
    rng, index = Random(seed), PrefixIndex(capacity)
    prompts = [[rng.randbytes(16) for _ in range(rng.randrange(1, 60))] for _ in range(20)]
    workers = [index.open(bytes([n])) for n in range(3)]
    sequence = 0
    for prompt in prompts:
        for worker in workers:
            worker.apply(pb.PrefixEvents(sequence=sequence, added=prompt))
        sequence += len(prompt)
    workers.pop().close()
    assert len(index) <= capacity
    for prompt in prompts:
        having = rng.randrange(len(prompt) + 1)
        gone = prompt[having:]
        for worker in workers:
            worker.apply(pb.PrefixEvents(sequence=sequence, removed=gone))
        sequence += len(gone)
        known = index.num_cached(prompt)
        assert all(num <= having for num in known.values())
        assert len(set(known.values())) <= 1, "both have the same blocks"
    total = sum(map(len, prompts))
    assert index.sampled_share >= min(1, capacity / total / 16) or capacity < 16


def test_a_full_table_is_filled_again_when_a_worker_restarts() -> None:
    """The worker's former blocks make room, however few of them the new blocks collide with."""
    rng, index = Random(5), PrefixIndex(capacity=10_000)
    workers = [index.open(bytes([n])) for n in range(10)]
    for worker in workers:
        worker.apply(pb.PrefixEvents(reset=True, added=[rng.randbytes(16) for _ in range(1000)]))
    assert (len(index), index.sampled_share) == (10_000, 1)
    workers[0].close()
    again = index.open(b"again")
    own = [rng.randbytes(16) for _ in range(1000)]
    again.apply(pb.PrefixEvents(reset=True, added=own))
    assert (len(again), index.sampled_share) == (1000, 1)
    assert num_cached(index, b"again", own) == 1000


def test_the_room_of_a_removed_worker_is_reused() -> None:
    index = PrefixIndex(capacity=1000)
    rng = Random(1)
    for _ in range(20):
        worker = index.open(b"a")
        own = [rng.randbytes(16) for _ in range(900)]
        worker.apply(pb.PrefixEvents(reset=True, added=own))
        assert len(worker) == len(index) == 900
        assert num_cached(index, b"a", own) == 900
        assert worker.bit == 1
        worker.close()
    assert len(index) == 0


def test_a_reset_is_no_gap() -> None:
    index = PrefixIndex()
    worker = index.open(b"a")
    worker.apply(pb.PrefixEvents(sequence=3, added=HASHES[:3]))
    worker.apply(pb.PrefixEvents(sequence=7, reset=True, added=HASHES[4:5]))
    assert (len(worker), index.num_gaps) == (1, 0)
    worker.apply(pb.PrefixEvents(sequence=9, added=HASHES[5:6]))
    assert (len(worker), index.num_gaps) == (1, 1)
    assert num_cached(index, b"a", [HASHES[4]]) == 0


def test_invalid_hashes_are_refused() -> None:
    index = PrefixIndex()
    worker = index.open(b"a")
    worker.apply(pb.PrefixEvents(added=[b"short", b"", bytes(17), HASHES[0]]))
    worker.apply(pb.PrefixEvents(sequence=4, removed=[b"short", b""]))
    assert (len(worker), index.num_gaps) == (1, 0)


def test_a_hash_takes_at_most_forty_bytes() -> None:
    rng = Random(2)
    reported = [[rng.randbytes(16) for _ in range(10_000)] for _ in range(10)]
    index = PrefixIndex(capacity=100_000)
    tracemalloc.start()
    try:
        for number, own in enumerate(reported):
            added = reported[0][:1000] + own[1000:]
            index.open(bytes([number])).apply(pb.PrefixEvents(reset=True, added=added))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / len(index) <= 40


def test_blocks_in_many_mixtures_of_workers_take_little_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of 20,000 blocks is on some of 20 workers; hardly any two are on the same ones."""
    monkeypatch.setattr(prefix_index, "MAX_SETS", 1000)
    rng = Random(4)
    chains = [rng.randbytes(16) for _ in range(20_000)]
    reported = [rng.sample(chains, 5000) for _ in range(20)]
    index = PrefixIndex(capacity=20_000)
    tracemalloc.start()
    try:
        for number, added in enumerate(reported):
            index.open(bytes([number])).apply(pb.PrefixEvents(reset=True, added=added))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert index.num_left_out > 0, "the number of sets was at its limit"
    assert held <= 40 * len(index) + 300 * prefix_index.MAX_SETS


def test_a_prompt_is_looked_up_once_for_all_workers() -> None:
    """A lookup for each worker would make the cost depend on the number of workers."""
    looks = 0

    class Counting(PrefixIndex):
        def _find(self, chain: bytes) -> tuple[int, int, int]:
            nonlocal looks
            looks += 1
            return super()._find(chain)

    index = Counting()
    for number in range(100):
        index.open(bytes([number])).apply(pb.PrefixEvents(reset=True, added=HASHES))
    looks = 0
    assert len(index.num_cached(HASHES)) == 100
    assert looks == len(HASHES)


def test_the_number_of_sets_is_bounded_however_often_workers_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_index, "MAX_SETS", 500)
    rng, index = Random(6), PrefixIndex(capacity=4000)
    chains = [rng.randbytes(16) for _ in range(3000)]
    workers = [index.open(bytes([n])) for n in range(20)]
    truth = [set[bytes]() for _ in workers]
    for start in range(100):
        number = start % 20
        if start % 3:
            workers[number].close()
            workers[number] = index.open(bytes([number]))
        added = rng.sample(chains, 800)
        workers[number].apply(pb.PrefixEvents(reset=True, added=added))
        truth[number] = set(added)
        assert index.num_sets <= 500 + 20
    assert index.num_left_out > 1000
    for chain in chains:
        known = index.num_cached([chain])
        assert all(chain in truth[n] for n in range(len(workers)) if bytes([n]) in known)


def test_a_worker_that_joins_when_the_sets_are_at_their_limit_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_index, "MAX_SETS", 20)
    rng, index = Random(7), PrefixIndex()
    chains = [rng.randbytes(16) for _ in range(500)]
    for number in range(10):
        added = rng.sample(chains, 200)
        index.open(bytes([number])).apply(pb.PrefixEvents(reset=True, added=added))
    assert index.num_left_out > 0
    own = [rng.randbytes(16) for _ in range(100)]
    late = index.open(b"late")
    late.apply(pb.PrefixEvents(reset=True, added=own))
    assert (len(late), num_cached(index, b"late", own)) == (100, 100)


def test_the_number_of_distinct_sets_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond the limit the index knows less, and never reports a missing block, even after
    removals.
    """
    monkeypatch.setattr(prefix_index, "MAX_SETS", 20)
    rng, index = Random(3), PrefixIndex()
    chains = [rng.randbytes(16) for _ in range(200)]
    workers = [index.open(bytes([n])) for n in range(10)]
    truth: list[set[bytes]] = [set() for _ in workers]
    sequences = [0] * len(workers)
    for _ in range(300):
        number = rng.randrange(10)
        added = rng.sample(chains, 20)
        removed = rng.sample(chains, 10)
        event = pb.PrefixEvents(sequence=sequences[number], added=added, removed=removed)
        workers[number].apply(event)
        sequences[number] += 30
        truth[number] = (truth[number] | set(added)) - set(removed)
        for chain in rng.sample(chains, 5):
            known = index.num_cached([chain])
            assert all(chain in truth[n] for n in range(len(workers)) if bytes([n]) in known)
    assert index.num_left_out > 1000
    found = sum(len(index.num_cached([chain])) for chain in chains)
    assert found > 0
    for worker in workers:
        worker.close()
    assert len(index) == 0
