"""Block counts are consistent in every state of an engine; a missing or extra block is detected."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from builders.engine_kit import ask, fake_engine, made

from pdserve.engine.engine import Engine
from pdserve.services.worker.runtime import BlockAudit


def busy_engine(clock: Callable[[], float] = time.monotonic) -> Engine:
    """Return an engine with requests in every state that holds blocks, on two layer groups."""
    engine = fake_engine(num_blocks=96, window=8, max_running=4, clock=clock)
    engine.submit(ask("shared", range(30), max_tokens=2))
    engine.submit(ask("cached", range(31, 60), max_tokens=2))
    while engine.step() is not None:
        pass
    engine.submit(ask("runs", [*range(30), 5], n=2, max_tokens=40))
    engine.submit(ask("parked", range(9), max_tokens=40))
    engine.submit(ask("held", range(20), prefill_only=True))
    for _ in range(20):
        engine.step()
        stats = engine.stats()
        if stats.held and not stats.waiting_tokens:
            break
    assert engine.reserve(ask("reserved", [*range(30), 7, 8])) is not None
    assert engine.park("parked")
    stats = engine.stats()
    assert (stats.running, stats.held, stats.parked, stats.reserved) == (1, 1, 1, 1)
    assert stats.held_blocks
    assert stats.parked_blocks
    assert stats.blocks.used > stats.held_blocks + stats.parked_blocks
    assert stats.blocks.reserved
    assert stats.blocks.cached
    return engine


def test_block_counts_add_up_in_every_state_and_requests_have_ages() -> None:
    now = [0.0]
    engine = busy_engine(lambda: now[0])
    assert engine.discrepancy(recount=True) == ""
    now[0] += 7.0
    ages = engine.stats().oldest_s
    assert set(ages) == {"used", "held", "parked", "reserved"}
    assert all(7.0 <= age < 60.0 for age in ages.values())
    for key in ("runs", "parked", "held", "reserved"):
        engine.abort(key)
    assert engine.discrepancy(recount=True) == ""
    assert set(engine.stats().oldest_s.values()) == {0.0}


def leak(engine: Any) -> None:
    engine.jobs.tables.pools[0]._free.pop()


def count_twice(engine: Any) -> None:
    engine.jobs.tables.pools[1]._num_used += 1


def forget_a_sequence(engine: Any) -> None:
    engine.jobs.running[0].sequences.pop()


def keep_after_the_end(engine: Any) -> None:
    tables = engine.jobs.tables
    close, tables.close = tables.close, lambda *_: None
    engine.abort("held")
    tables.close = close


def release_twice(engine: Any) -> None:
    sequence = engine.jobs.held["held"].sequences[0]
    engine.jobs.tables.pools[0].release([sequence.block_tables[0][-1]])


def test_a_discrepancy_is_found(subtests: pytest.Subtests) -> None:
    for bug, at_a_glance in (
        (leak, True),
        (count_twice, True),
        (forget_a_sequence, False),
        (keep_after_the_end, False),
        (release_twice, False),
    ):
        with subtests.test(bug.__name__):
            engine = busy_engine()
            bug(engine)
            found = engine.discrepancy(recount=True)
            assert found.startswith("group ")
            assert bool(engine.discrepancy()) == at_a_glance
            made.remove(engine)  # or the check at the test's end finds it


def test_leaked_blocks_of_an_idle_engine_are_found_by_the_quick_check() -> None:
    engine = fake_engine()
    engine.jobs.tables.pools[0].allocate(3)
    assert "used=3" in engine.discrepancy()
    assert "no request" in engine.discrepancy()
    made.remove(engine)


def test_a_worker_counts_each_finding_and_logs_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    audit = BlockAudit()
    found = ["", "a", "a", "b", "", "a"]
    assert [audit.look(one) for one in found] == [0, 1, 2, 3, 3, 4]
    said = [r.getMessage() for r in caplog.records]
    assert said == [f"KV blocks do not add up: {one}" for one in ("a", "b", "a")]
