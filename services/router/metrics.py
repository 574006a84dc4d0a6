"""The router's own metrics, read from the core when they are asked for."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pdserve.protos.fleet_pb2 import Role
from pdserve.services.router.core import RouterCore


class RouterMetrics:
    """A collector. It runs on the metrics thread and only reads."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core

    def collect(self) -> Iterator[Metric]:
        dispatcher = self._core.dispatcher
        workers = GaugeMetricFamily(
            "pdserve_router_workers", "Workers by role and state", labels=("role", "state")
        )
        counts: dict[tuple[str, str], int] = {}
        for worker in list(self._core.fleet.workers.values()):
            key = (Role.Name(worker.hello.role).lower(), worker.state.value)
            counts[key] = counts.get(key, 0) + 1
        for labels, count in counts.items():
            workers.add_metric(labels, count)
        yield workers
        yield GaugeMetricFamily(
            "pdserve_router_requests", "Requests in the router", value=dispatcher.num_running
        )
        yield GaugeMetricFamily(
            "pdserve_router_queued", "Requests without a worker", value=dispatcher.num_queued
        )
        yield by_label(
            "pdserve_router_ended", "Requests by outcome", "outcome", dispatcher.outcomes
        )
        yield by_label(
            "pdserve_router_decisions", "Decisions by reason", "reason", dispatcher.placer.reasons
        )
        yield by_label("pdserve_router_prefills", "Prompts by where", "where", dispatcher.prefills)
        compatibility = dispatcher.placer.compatibility
        yield by_label(
            "pdserve_router_incompatible",
            "Pairs that a decision left out, by what differs",
            "difference",
            compatibility.incompatible,
        )
        yield by_label(
            "pdserve_router_inexact",
            "Resumes and hand-offs between KV identities",
            "what",
            compatibility.inexact,
        )
        yield CounterMetricFamily(
            "pdserve_router_retries", "Second and later tries", value=dispatcher.num_retries
        )
        yield CounterMetricFamily(
            "pdserve_router_frozen", "Engines found frozen", value=dispatcher.num_frozen
        )
        yield CounterMetricFamily(
            "pdserve_router_adopted",
            "Attempts that went on where another session left them",
            value=dispatcher.num_adopted,
        )
        yield GaugeMetricFamily(
            "pdserve_router_migrating",
            "Running requests that are being computed again",
            value=dispatcher.placer.budget.num_under_way,
        )
        migrations = dispatcher.migrations
        for name, text, value in (
            ("begun", "Moves of running requests to another decode worker", migrations.num_begun),
            ("done", "Moves of requests that went on there", migrations.num_done),
            ("bytes", "KV payload that moves sent", migrations.num_bytes),
            ("tokens", "Tokens moved, whose KV was not computed again", migrations.num_tokens),
        ):
            yield CounterMetricFamily(f"pdserve_router_moves_{name}", text, value=value)
        yield by_label(
            "pdserve_router_moves_failed",
            "Failed moves, by how far",
            "step",
            migrations.failed,
        )
        yield GaugeMetricFamily(
            "pdserve_router_moving", "Moves under way", value=migrations.num_under_way
        )
        yield CounterMetricFamily(
            "pdserve_router_stale", "Messages that named nothing", value=dispatcher.num_stale
        )


def by_label(name: str, text: str, label: str, counts: dict[str, int]) -> CounterMetricFamily:
    """A counter with one label."""
    family = CounterMetricFamily(name, text, labels=(label,))
    for value, count in list(counts.items()):
        family.add_metric((value,), count)
    return family
