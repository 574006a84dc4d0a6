"""What a scaler asks of the fleet: how long prompts wait for prefill, and how full decode is. Pure.

Both are of a model's live workers, as their loads tell, so every router says nearly the same.
"""

from collections.abc import Iterable

from pdserve.services.router.fleet.fleet import State, Worker


def prefill_backlog_s(prefills: Iterable[Worker], queued_tokens: int) -> float | None:
    """Seconds of work that wait: prompt tokens of their queues, and those that wait in the router,
    by the sum of the measured rates. A worker that has measured none counts as the others' mean;
    None if none has."""
    live = [w.load for w in prefills if w.state is State.LIVE]
    rates = [load.prefill_tokens_s for load in live if load.prefill_tokens_s]
    if not rates:
        return None
    tokens = queued_tokens + sum(load.waiting_tokens for load in live)
    return tokens / (sum(rates) / len(rates) * len(live))


def decode_kv_used_ratio(decodes: Iterable[Worker]) -> float | None:
    """The part of their KV tokens that requests hold or are promised; None without any KV."""
    taken = total = 0
    for worker in decodes:
        if worker.state is State.LIVE:
            load, size = worker.load, worker.layout.block_size
            taken += (load.blocks_used + load.blocks_reserved) * size + load.promised_tokens
            total += load.blocks_total * size
    return taken / total if total else None
