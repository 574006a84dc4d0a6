"""Requests for direct tests of the scheduling parts, and the invariants of every job table."""

import random
from typing import Any

from pdserve.engine.api import Request, SamplingParams
from pdserve.engine.kv import KvSpec, LayerGroup, cache_seed, pool_sizes
from pdserve.engine.scheduling import BlockTables, EngineLimits, JobTable, RequestState, discrepancy

SEED_HASH = cache_seed(b"model", b"")
VOCAB = 8


def spec_of(block_size: int, window: int) -> KvSpec:
    """Return a group with full attention, and with a window a second group."""
    groups = [LayerGroup((0,), "full", 0, 1, 1, "float32", 0, 1)]
    if window:
        groups.append(LayerGroup((1,), "window", window, 1, 1, "float32", 0, 1))
    return KvSpec(block_size, tuple(groups))


def make_jobs(limits: EngineLimits, window: int) -> JobTable:
    """Return a job table whose window group has a pool with a separate size, as in an engine."""
    spec = spec_of(limits.block_size, window)
    sizes = pool_sizes(spec, limits.num_blocks, limits.max_running, limits.chunk_size)
    return JobTable(BlockTables(spec, sizes, limits.chunk_size), limits.max_running)


def prompt_of(rng: random.Random, length: int) -> tuple[int, ...]:
    """Return a prompt; most begin alike, so that prefixes are shared."""
    common = [1, 2, 3, 4, 5, 6, 7] * 8
    shared = rng.choice((0, length // 2, length, length))
    return tuple(common[:shared] + [rng.randrange(VOCAB) for _ in range(length - shared)])


def make_job(
    limits: EngineLimits,
    key: str,
    order: int,
    prompt: tuple[int, ...],
    now_s: float = 0.0,
    prefill_only: bool = False,
    tenant: bytes = b"",
    priority: int = 0,
    **params: Any,
) -> RequestState:
    """Return a checked request as the engine would make it. Raises InvalidRequest and so on."""
    request = Request(
        key,
        prompt,
        SamplingParams(**params),
        seed=0,
        choices=(),
        prefill_only=prefill_only,
        tenant=tenant,
        priority=priority,
    )
    return RequestState(request, order, now_s, limits.check(request), SEED_HASH)


def check_table(jobs: JobTable, num_slots: int) -> None:
    """Check that every block and every slot has exactly one owner, and every job one state."""
    assert discrepancy(jobs, recount=True) == ""
    reserved = [reservation.job for reservation in jobs.reserved.values()]
    places = [
        *jobs.waiting.values(),
        *jobs.running,
        *jobs.held.values(),
        *reserved,
        *jobs.parked.values(),
    ]
    assert sorted(job.key for job in places) == sorted(jobs.by_key)
    assert [job.order for job in jobs.running] == sorted(job.order for job in jobs.running)
    slots: list[int] = []
    for job in places:
        mine = job.slots + [s.slot for s in job.sequences if s.slot >= 0]
        if job in jobs.running:
            assert len(mine) == job.num_places
            assert all(sequence.slot >= 0 for sequence in job.sequences)
        else:
            assert mine == [], "a request without steps has a slot"
        slots += mine
    assert len(set(slots)) == len(slots)
    assert len(slots) + jobs.num_free_slots == num_slots
