"""The router's Prometheus metrics, read from the core at each scrape, and figures for autoscalers.

The figures for autoscalers are computed from the loads of a model's live workers, so all routers
with the same workers report nearly the same values; only the figures of a router's own queue
differ.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from pdserve.protos.fleet_pb2 import DECODE, PREFILL, Role
from pdserve.services.common.metrics import family
from pdserve.services.router.core import RouterCore
from pdserve.services.router.fleet import State, Worker


@dataclass(frozen=True, slots=True)
class Backlog:
    """Time that a model's waiting prefill work takes, in seconds, at the sum of the measured rates
    of its live prefill workers."""

    workers_s: float  # in the workers' queues, which every router knows
    router_s: float  # in this router's queue, which no other router knows


def prefill_backlog(prefills: Iterable[Worker], queued_tokens: int) -> Backlog | None:
    """Return how long the waiting prompts of a model take on its live prefill workers, or None if
    no worker has measured its rate yet. A worker without a rate counts as the mean of the others.
    `queued_tokens`: tokens of the prompts that wait in the router."""
    live = [w.load for w in prefills if w.state is State.LIVE]
    rates = [load.prefill_tokens_s for load in live if load.prefill_tokens_s]
    if not rates:
        return None
    tokens_s = sum(rates) / len(rates) * len(live)
    return Backlog(sum(load.waiting_tokens for load in live) / tokens_s, queued_tokens / tokens_s)


def decode_kv_used_ratio(decodes: Iterable[Worker]) -> float | None:
    """Return the share of the live decode workers' KV tokens that requests hold or are promised;
    None if the workers have no KV."""
    used_tokens = total_tokens = 0
    for worker in decodes:
        if worker.state is State.LIVE:
            load, size = worker.load, worker.kind.layout.block_size
            used_tokens += (load.blocks_used + load.blocks_reserved) * size + load.promised_tokens
            total_tokens += load.blocks_total * size
    return used_tokens / total_tokens if total_tokens else None


class RouterMetrics:
    """Prometheus collector of the router's metrics. It runs on the metrics thread and only
    reads."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core

    def collect(self) -> Iterator[Metric]:
        core, dispatcher, prefixes = self._core, self._core.dispatcher, self._core.fleet.prefixes
        placer, migrations = dispatcher.placer, dispatcher.migrations
        yield from self._workers()
        yield from self._of_models()
        for name, text, value in (
            ("requests", "Requests in the router", dispatcher.num_running),
            (
                "isolated",
                "1 while the router has lost contact with most of its workers",
                core.fleet.isolated,
            ),
            (
                "migrating",
                "Running requests that are being recomputed",
                placer.budget.num_under_way,
            ),
            ("moving", "Moves in progress", migrations.num_under_way),
            (
                "prefix_blocks",
                "Distinct KV blocks of workers' prefix caches that the router tracks",
                len(prefixes),
            ),
            (
                "prefix_sampled_share",
                "Share of blocks that the router tracks; halved when --prefix-index-hashes is too "
                "low",
                prefixes.sampled_share,
            ),
        ):
            yield GaugeMetricFamily(f"pdserve_router_{name}", text, value=value)
        for name, text, value in (
            (
                "isolations",
                "Times that the router lost contact with most of its workers",
                core.num_isolations,
            ),
            ("retries", "Second and later attempts", dispatcher.num_retries),
            ("frozen", "Engines found frozen", dispatcher.num_frozen),
            ("adopted", "Attempts resumed after their session was lost", dispatcher.num_adopted),
            (
                "moves_begun",
                "Moves of running requests to another decode worker",
                migrations.num_begun,
            ),
            ("moves_done", "Completed moves", migrations.num_done),
            ("moves_bytes", "KV payload that moves sent", migrations.num_bytes),
            (
                "moves_tokens",
                "Tokens whose KV moved instead of being recomputed",
                migrations.num_tokens,
            ),
            ("stale", "Messages about unknown or ended attempts", dispatcher.num_stale),
            (
                "prefix_left_out",
                "Workers of a block not recorded because too many sets of workers share blocks",
                prefixes.num_left_out,
            ),
            (
                "prefix_gaps",
                "Gaps in workers' prefix cache events; after each, the worker sends its state "
                "again",
                prefixes.num_gaps,
            ),
        ):
            yield CounterMetricFamily(f"pdserve_router_{name}", text, value=value)
        compatibility = placer.compatibility
        for name, text, label, counts in (
            ("ended", "Requests by outcome", "outcome", dispatcher.outcomes),
            ("decisions", "Placement decisions by reason", "reason", placer.reasons),
            ("prefills", "Prompts by the place of their prefill", "where", dispatcher.prefills),
            (
                "incompatible",
                "Worker pairs excluded from a decision, by difference",
                "difference",
                compatibility.incompatible,
            ),
            (
                "inexact",
                "Resumes and hand-offs between different KV identities",
                "what",
                compatibility.inexact,
            ),
            (
                "moves_failed",
                "Failed moves, by the step that they reached",
                "step",
                migrations.failed,
            ),
        ):
            samples = [((label_value,), count) for label_value, count in list(counts.items())]
            yield family(CounterMetricFamily, f"pdserve_router_{name}", text, (label,), samples)
        yield family(
            CounterMetricFamily,
            "pdserve_router_worker_deaths",
            "Workers that disappeared without deregistering",
            ("model_name", "role"),
            list(core.deaths.items()),
        )

    def _workers(self) -> Iterator[Metric]:
        """Yield metrics of the workers that joined this router: their number by state, and the
        seconds since the last message of each. With --join-routers, only some of all workers join
        this router."""
        states = GaugeMetricFamily(
            "pdserve_router_workers",
            "Workers that joined this router, by role and state; without --join-routers, all do",
            labels=("model_name", "role", "state"),
        )
        silent = GaugeMetricFamily(
            "pdserve_worker_silent_seconds",
            "Seconds since the worker's last message",
            labels=("model_name", "worker", "role", "state"),
        )
        counts = {(model, "decode", "live"): 0 for model in self._core.dispatcher.models}
        now = self._core.now
        for worker in list(self._core.fleet.workers.values()):
            model, state = worker.model, worker.state.value
            role = Role.Name(worker.role).lower()
            counts[model, role, state] = counts.get((model, role, state), 0) + 1
            silent.add_metric((model, worker.address, role, state), now - worker.heard)
        for labels, count in counts.items():
            states.add_metric(labels, count)
        yield states
        yield silent

    def _of_models(self) -> Iterator[Metric]:
        """Yield metrics of each model: waiting requests, queue times, and the figures for
        autoscalers."""
        dispatcher, model_name = self._core.dispatcher, ("model_name",)
        queued = GaugeMetricFamily(
            "pdserve_router_queued", "Requests that wait for a worker", labels=model_name
        )
        waits = HistogramMetricFamily(
            "pdserve_router_queue_seconds",
            "Time from a request's arrival to its first attempt or its queue timeout",
            labels=model_name,
        )
        backlog = GaugeMetricFamily(
            "pdserve_prefill_backlog_seconds",
            "Prompt tokens in the queues of prefill workers, divided by the sum of the live "
            "workers' rates. All routers of these workers report the same: take the max",
            labels=model_name,
        )
        own_backlog = GaugeMetricFamily(
            "pdserve_router_prefill_wait_seconds",
            "Prompt tokens that wait in this router for prefill, divided by the same rates: take "
            "the sum",
            labels=model_name,
        )
        used = GaugeMetricFamily(
            "pdserve_decode_kv_used_ratio",
            "Share of the live decode workers' KV tokens that are in use or promised. Every router "
            "counts the workers that joined it: take the max",
            labels=model_name,
        )
        waiting = list(dispatcher.placer.waiting)
        workers = list(self._core.fleet.workers.values())
        for model in dispatcher.models:
            model_requests = [request for request in waiting if request.model == model]
            of_role: dict[int, list[Worker]] = {PREFILL: [], DECODE: []}
            for worker in workers:
                if worker.model == model:
                    of_role[worker.role].append(worker)
            tokens = sum(map(dispatcher.placer.remote_tokens, model_requests))
            queued.add_metric((model,), len(model_requests))
            if (wait := prefill_backlog(of_role[PREFILL], tokens)) is not None:
                backlog.add_metric((model,), wait.workers_s)
                own_backlog.add_metric((model,), wait.router_s)
            if (ratio := decode_kv_used_ratio(of_role[DECODE])) is not None:
                used.add_metric((model,), ratio)
        for model, observations in list(dispatcher.queue_waits.items()):
            waits.add_metric((model,), observations.buckets(), observations.total)
        yield from (queued, waits, backlog, own_backlog, used)
