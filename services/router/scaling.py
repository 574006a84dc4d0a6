"""Figures for autoscalers: how long prompts wait for prefill, and how full decode is. Pure.

Both come from the loads of a model's live workers, so all routers that know the workers report
nearly the same; only the queue in a router is its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.services.router.fleet.fleet import State, Worker


@dataclass(frozen=True, slots=True)
class Backlog:
    """Seconds of waiting prefill work, at the sum of the live workers' measured rates."""

    workers_s: float  # in the workers' queues, which every router knows
    router_s: float  # in this router's queue, which no other router knows


def prefill_backlog(prefills: Iterable[Worker], queued_tokens: int) -> Backlog | None:
    """Return the backlog, or None if no worker has measured a rate; a worker without one counts as
    the mean of the others. `queued_tokens`: of prompts that wait in the router."""
    live = [w.load for w in prefills if w.state is State.LIVE]
    rates = [load.prefill_tokens_s for load in live if load.prefill_tokens_s]
    if not rates:
        return None
    tokens_s = sum(rates) / len(rates) * len(live)
    return Backlog(sum(load.waiting_tokens for load in live) / tokens_s, queued_tokens / tokens_s)


def decode_kv_used_ratio(decodes: Iterable[Worker]) -> float | None:
    """Return the part of all KV tokens that requests hold or are promised; None without any KV."""
    used_tokens = total_tokens = 0
    for worker in decodes:
        if worker.state is State.LIVE:
            load, size = worker.load, worker.kind.layout.block_size
            used_tokens += (load.blocks_used + load.blocks_reserved) * size + load.promised_tokens
            total_tokens += load.blocks_total * size
    return used_tokens / total_tokens if total_tokens else None
