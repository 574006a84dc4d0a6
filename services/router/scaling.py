"""What a scaler asks of the fleet: how long prompts wait for prefill, and how full decode is. Pure.

Both are of a model's live workers, as their loads tell, so every router that knows all of them says
nearly the same; what waits in a router is its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.services.router.fleet.fleet import State, Worker


@dataclass(frozen=True, slots=True)
class Backlog:
    """Seconds of prefill that wait, by the sum of the live workers' measured rates."""

    workers_s: float  # in their queues, which every router knows
    router_s: float  # in this router, which no other one knows


def prefill_backlog(prefills: Iterable[Worker], queued_tokens: int) -> Backlog | None:
    """`queued_tokens`: of prompts that wait in the router. A worker that has measured no rate
    counts as the others' mean; None if none has."""
    live = [w.load for w in prefills if w.state is State.LIVE]
    rates = [load.prefill_tokens_s for load in live if load.prefill_tokens_s]
    if not rates:
        return None
    tokens_s = sum(rates) / len(rates) * len(live)
    return Backlog(sum(load.waiting_tokens for load in live) / tokens_s, queued_tokens / tokens_s)


def decode_kv_used_ratio(decodes: Iterable[Worker]) -> float | None:
    """The part of their KV tokens that requests hold or are promised; None without any KV."""
    taken = total = 0
    for worker in decodes:
        if worker.state is State.LIVE:
            load, size = worker.load, worker.kind.layout.block_size
            taken += (load.blocks_used + load.blocks_reserved) * size + load.promised_tokens
            total += load.blocks_total * size
    return taken / total if total else None
