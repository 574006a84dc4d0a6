"""Engines over the fake decoder, and functions that run requests to their end."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from fakes.decoder import VOCAB, FakeDecoder, fake_spec
from fakes.late_device import AheadEngine, LateSampling

from pdserve.engine.api import Event, NewTokens, Request, SamplingParams
from pdserve.engine.constraints.grammars import GrammarBackend
from pdserve.engine.engine import Engine
from pdserve.engine.kv import KvIdentity, KvSpec, pool_sizes
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.scheduling import EngineLimits
from pdserve.kernels import reference

launches_ahead = False  # whether engines launch a step before they have read the previous one
made: list[Engine] = []  # by the running test; tests/conftest.py recounts their blocks at its end


def fake_engine(
    num_blocks: int = 64,
    block_size: int = 4,
    window: int = 0,
    prefix_cache: bool = True,
    model: Any = None,
    clock: Callable[[], float] = time.monotonic,
    grammars: GrammarBackend | None = None,
    ahead: bool | None = None,
    **limits: Any,
) -> Engine:
    """Return an engine over the fake decoder. `ahead`: see launches_ahead."""
    spec = fake_spec(block_size, window)
    ahead = launches_ahead if ahead is None else ahead
    engine = _engine(spec, num_blocks, prefix_cache, model, clock, grammars, ahead, limits)
    made.append(engine)
    return engine


def _engine(
    spec: KvSpec,
    num_blocks: int,
    prefix_cache: bool,
    model: Any,
    clock: Callable[[], float],
    grammars: GrammarBackend | None,
    ahead: bool,
    limits: dict[str, Any],
) -> Engine:
    options: dict[str, Any] = {
        "vocab_size": VOCAB,
        "context_len": 256,
        "block_size": spec.block_size,
        "num_blocks": num_blocks,
        "max_running": 8,
        "chunk_size": 16,
    }
    bounds = EngineLimits(**(options | limits))
    late = LateSampling()
    kind, ops = (AheadEngine, late) if ahead else (Engine, reference)
    engine = kind(
        model or FakeDecoder(spec),
        KvCache(spec, pool_sizes(spec, num_blocks, bounds.max_running, bounds.chunk_size)),
        bounds,
        ops,
        kv_identity=KvIdentity(b"test"),
        prefix_cache=prefix_cache,
        clock=clock,
        grammars=grammars,
    )
    if isinstance(engine, AheadEngine):
        engine.sampling = late
    return engine


def ask(key: str, prompt: Iterable[int], seed: int = 0, **params: Any) -> Request:
    """Return a greedy request of eight tokens unless `params` differ."""
    choices = params.pop("choices", ())
    salt = params.pop("cache_salt", b"")
    prefill_only = params.pop("prefill_only", False)
    options = {"temperature": 0.0, "max_tokens": 8} | params
    return Request(key, tuple(prompt), SamplingParams(**options), seed, choices, salt, prefill_only)


def run(engine: Engine, *requests: Request, max_steps: int = 2000) -> list[Event]:
    """Submit the requests and step until all have ended; return all events in order."""
    for request in requests:
        engine.submit(request)
    events: list[Event] = []
    for _ in range(max_steps):
        step = engine.step()
        if step is None:
            return events
        events.extend(step.events)
    raise AssertionError(f"not at rest after {max_steps} steps")


def until(engine: Engine, kind: type, key: str, max_steps: int = 2000) -> Event:
    """Step until there is such an event of a request."""
    for _ in range(max_steps):
        step = engine.step()
        if step is not None and (found := of(step.events, kind, key)):
            event: Event = found[0]
            return event
    raise AssertionError(f"no {kind.__name__} of {key} in {max_steps} steps")


def tokens(events: Iterable[Event]) -> dict[tuple[str, int], list[int]]:
    """Return generated ids per (request, choice); positions must continue without a gap."""
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    first: dict[tuple[str, int], int] = {}
    for event in events:
        if isinstance(event, NewTokens):
            at = (event.key, event.choice)
            start = first.setdefault(at, event.position)
            assert event.position == start + len(found[at])
            found[at].extend(event.ids)
    return dict(found)


def of(events: Iterable[Event], kind: type, key: str | None = None) -> list[Any]:
    return [e for e in events if isinstance(e, kind) and (key is None or e.key == key)]


def assert_at_rest(engine: Engine) -> None:
    """Check that every block is free or cached, in every group."""
    for pool in engine.jobs.tables.pools:
        counts = pool.counts()
        assert counts.total == pool.num_blocks
        assert counts.used == counts.reserved == 0, counts
    assert not engine.jobs.by_key
    assert engine.jobs.num_free_slots == engine.limits.max_running
