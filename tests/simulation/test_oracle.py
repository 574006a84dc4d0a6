"""The oracle detects errors: each seeded bug is found and shrunk to a short scenario."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from pdserve.engine.engine import Engine
from pdserve.engine.execution import Batch, GroupTable
from pdserve.engine.handoff.protocol import Bitmap, TagKey
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.scheduling import BlockTables
from pdserve.protos import worker_pb2 as wire
from pdserve.services.common.rpc import RequestProgress
from pdserve.services.decode.core import DecodeCore
from simulation.model import Model, spec
from simulation.run import make, simulate
from simulation.scenario import Scenario
from simulation.shrink import rules, shrunk

Bug = Callable[[], AbstractContextManager[Any]]


def unchecked_payloads() -> AbstractContextManager[Any]:
    return patch.object(TagKey, "matches", lambda *_: True)


def committed_before_the_last_frame() -> AbstractContextManager[Any]:
    return patch.object(Bitmap, "complete", property(lambda bitmap: bitmap._missing <= 2))


def blocks_stay_reserved() -> AbstractContextManager[Any]:
    return patch.object(Engine, "release", lambda *_: None)


def blocks_of_ended_sequences_are_kept() -> AbstractContextManager[Any]:
    return patch.object(BlockTables, "close", lambda *_: None)


def positions_are_ignored() -> AbstractContextManager[Any]:
    """Patch router and gateway, which share this bookkeeping, to accept every id that arrives."""
    return patch.object(RequestProgress, "take", lambda _, tokens: tokens)


def nobody_is_adopted() -> AbstractContextManager[Any]:
    def resume(core: Any, session: Any, resume: wire.Resume) -> None:
        session.outbox.put(wire.DecodeEvent(gone=wire.Gone(attempt=resume.attempt)))

    return patch.object(DecodeCore, "resume", resume)


BUGS: list[tuple[Bug, str, str, str]] = [
    (unchecked_payloads, "bit flip", "transferring", "choice # is"),
    (committed_before_the_last_frame, "reordered message", "transferring", "choice # is"),
    (blocks_stay_reserved, "SIGKILL prefill", "transferring", "holds"),
    (blocks_of_ended_sequences_are_kept, "client closes", "decoding", "do not add up"),
    (nobody_is_adopted, "router restart", "decoding", "prompt tokens computed again"),
    (positions_are_ignored, "duplicate message", "decoding", "ids from"),
]


def first_found(bug: Bug, kind: str, phase: str, text: str) -> tuple[int, Scenario]:
    for seed in range(12):
        scenario = make(seed, kind, phase)
        with bug():
            result = simulate(scenario)
        if any(text in rule for rule in rules(result)):
            return seed, scenario
    raise AssertionError("not found in 12 runs")


@pytest.mark.parametrize(
    ("bug", "kind", "phase", "text"), BUGS, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_seeded_bug_is_found(bug: Bug, kind: str, phase: str, text: str) -> None:
    _, scenario = first_found(bug, kind, phase, text)
    assert not simulate(scenario).violations, "the scenario fails without the bug, too"


def test_a_failing_scenario_is_shrunk() -> None:
    bug, kind, phase, text = BUGS[2]
    _, scenario = first_found(bug, kind, phase, text)
    with bug():
        short = shrunk(scenario, most=60)
        assert any(text in rule for rule in rules(simulate(Scenario.from_json(short.to_json()))))
    assert len(short.asks) < len(scenario.asks)
    assert len(short.faults) == 1


def test_a_passing_scenario_cannot_be_shrunk() -> None:
    with pytest.raises(ValueError, match="no objection"):
        shrunk(make(0, "client closes", "decoding").without_faults())


@pytest.mark.parametrize("window", [0, 10])
def test_every_bit_of_kv_affects_the_token(window: int) -> None:
    """Covers each visible word of keys and values in each layer."""
    layout = spec(4, window)
    prompt = [(i * 7) % 60 + 1 for i in range(22)]
    kv = KvCache(layout, [8] * len(layout.groups))
    model = Model(layout)
    table = np.array([[3, 1, 5, 2, 7, 4]])

    def batch(start: int, end: int) -> Any:
        at = np.arange(start, end)
        slots = table[0, at // 4] * 4 + at % 4
        groups = tuple(GroupTable(table, slots) for _ in layout.groups)
        ids = np.array(prompt[start:end])
        return Batch(ids, at, (0, end - start), (end,), 0, groups, np.array([end - start - 1]))

    model.forward(batch(0, 21), kv)
    clean = int(model.forward(batch(21, 22), kv)[0, 0])
    changed = 0
    for number, group in enumerate(layout.groups):
        words = kv.data[number].view(np.uint32)
        first = max(0, 22 - group.window) if group.window else 0
        for p in range(first, 21):
            where = words[:, table[0, p // 4], :, 0, p % 4, :]
            for index in np.ndindex(where.shape):
                where[index] ^= np.uint32(1 << (p + sum(index)) % 32)
                changed += int(model.forward(batch(21, 22), kv)[0, 0]) != clean
                where[index] ^= np.uint32(1 << (p + sum(index)) % 32)
        expected = sum(
            (21 - (max(0, 22 - g.window) if g.window else 0)) * len(g.layers) * 4
            for g in layout.groups[: number + 1]
        )
        assert changed == expected
