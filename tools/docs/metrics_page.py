"""Prints docs/metrics.md, which is generated from the collectors.

`make docs` writes the page, and tests/test_docs.py compares it. A collector shows its labels only
in samples, so this program gives each collector some.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric

from pdserve.engine.kv import KvSpec, encode_spec
from pdserve.gateway.metrics import GatewayMetrics
from pdserve.protos import common_pb2 as pb
from pdserve.protos import fleet_pb2, router_pb2
from pdserve.services.common.auth.certificates import make_authority
from pdserve.services.common.metrics import ProcessFacts, lag_histogram
from pdserve.services.common.observations import Observations
from pdserve.services.picker.picker import PickerMetrics
from pdserve.services.router.core import RouterCore
from pdserve.services.router.dispatcher import QUEUE_WAITS_S
from pdserve.services.router.metrics import RouterMetrics
from pdserve.services.router.placement import Rules
from pdserve.services.worker.metrics import WorkerMetrics

HEAD = """\
# Metrics

`make docs` writes this page from the code. Metrics whose names begin with `vllm:` have the same
meaning as in vLLM, so vLLM's dashboards work, with these exceptions: a worker's
`vllm:prompt_tokens` counts computed tokens, without cached ones, and a gateway's counts the tokens
of answered requests; `vllm:request_prefill_time_seconds` ends when the prompt's KV is computed,
before its transfer; `vllm:e2e_request_latency_seconds` ends when the request is closed; a choice
that ends with a tool call has the reason "tool_calls"; and a request whose client disconnects is
counted in `pdserve_request_failures`. The samples of a counter end in `_total`, those of a
histogram in `_bucket`, `_sum` and `_count`.

## What to scrape
`pdserve up` is one target: `/metrics` on its HTTP port exports the metrics of the gateway and of
the fleet. `pdserve top` reads the same page. `pdserve gateway --workers N` is one target, too: each
of its processes returns the sums of all ([gateways.md](gateways.md)).

In a cluster, scrape each process for its own metrics only. Start gateways with
`--no-fleet-metrics` (`PDSERVE_FLEET_METRICS=false`), and routers and workers with `--metrics-port`.
Otherwise each gateway would also export the metrics of the fleet, and they would be counted several
times. The query parameters `fleet=true` and `fleet=false` override the option for one request.

<!-- not run: a part of the configuration of a Prometheus -->
```yaml
scrape_configs:
  - job_name: pdserve-gateways # what clients see: latencies, tokens, finish reasons
    authorization: { credentials: API_KEY } # not needed with --open-metrics
    static_configs: [{ targets: ["gateway-1:8000", "gateway-2:8000", "gateway-3:8000"] }]
  - job_name: pdserve-workers # the engines: batches, queues, KV blocks, transfers
    static_configs: [{ targets: ["prefill-1:9090", "decode-1:9090", "decode-2:9090"] }]
    metric_relabel_configs: # gateways count the tokens of answers
      - { source_labels: [__name__], regex: "vllm:(prompt|generation)_tokens_total", action: drop }
  - job_name: pdserve-routers # placements, queues, retries, moves, and the state of the fleet
    static_configs: [{ targets: ["router-1:9090", "router-2:9090"] }]
```

`k8s/observability` has the same configuration for Kubernetes (PodMonitors), and
docker-compose.observability.yml for Compose, both with dashboards and alerts.
[runbook.md](runbook.md) explains the alerts.

{sums}

Autoscalers of prefill workers read `pdserve_prefill_backlog_seconds` and the sum of the routers'
`pdserve_router_prefill_wait_seconds`; those of decode workers read `pdserve_decode_kv_used_ratio`
and `pdserve_router_queued`. The Gateway API Inference Extension reads
`vllm:num_requests_waiting`, `vllm:num_requests_running`, `vllm:kv_cache_usage_perc` and
`vllm:cache_config_info` under these names.

Each process also exports the metrics of prometheus_client (`process_cpu_seconds_total`,
`process_resident_memory_bytes`, `process_open_fds`, ...), except with `--workers N`, where each
scrape would reach another process.
"""
# The exporting processes, the processes to sum over, and the meaning of the sum.
SUMS = (
    (
        "gateways",
        "all gateways",
        "the whole system; for histograms, `sum by (le)` of the buckets and `histogram_quantile`",
    ),
    (
        "workers",
        "all workers",
        "the whole system, without the tokens that gateways count under the same names",
    ),
    (
        "routers: counters, and metrics of their own requests (`pdserve_router_requests`, "
        "`_queued`, `_queue_seconds`, `_prefill_wait_seconds`, `_moving`, `_migrating`)",
        "all routers",
        "the whole system: each request is in one router",
    ),
    (
        "routers: metrics of the workers (`pdserve_router_workers`, `_worker_deaths`, "
        "`_frozen`, `pdserve_worker_silent_seconds`), and metrics for autoscalers "
        "(`pdserve_prefill_backlog_seconds`, `pdserve_decode_kv_used_ratio`)",
        "no sum: take the `max`",
        "the whole system; with `--join-routers`, one router's part ([scale.md](scale.md))",
    ),
    ("every process", "no sum", "each process by itself"),
)
CARD = pb.ModelCard(name="x", kv_spec=encode_spec(KvSpec(4, ())))
HELLO = fleet_pb2.WorkerHello(role=fleet_pb2.DECODE, incarnation=b"x", address="x:1", card=CARD)
PREFILL = fleet_pb2.WorkerHello(role=fleet_pb2.PREFILL, incarnation=b"y", address="y:1", card=CARD)
LOAD = fleet_pb2.Load(
    blocks_total=1,
    prefill_tokens_s=1,
    oldest_s={"x": 1.0},
    refused_frames=[fleet_pb2.Refused(reason="x")],
    transports=[fleet_pb2.TransportCounters(transport="x")],
)
MAX_LABELS = 4
AUTHORITY = make_authority().certificate.decode()


def process_metrics() -> list[Metric]:
    """Return the metrics of every process, without those of prometheus_client."""
    registry = CollectorRegistry()
    registry.register(ProcessFacts({"cluster_ca": AUTHORITY}))
    lag_histogram(registry)
    return list(registry.collect())


def gateway_metrics() -> list[Metric]:
    """Return the gateway's own metrics."""
    metrics = GatewayMetrics()
    for metric in vars(metrics).values():
        for number in range(1, MAX_LABELS):
            with suppress(ValueError):  # it has a different number of labels
                if isinstance(metric, Counter | Gauge | Histogram):
                    metric.labels(*["x"] * number)
    metrics.itl.of("x")
    common = {metric.name for metric in process_metrics()}
    return [metric for metric in metrics.registry.collect() if metric.name not in common]


def fleet_metrics() -> list[Metric]:
    """Return the metrics of the fleet that a gateway exports."""
    metrics = GatewayMetrics()
    worker = router_pb2.WorkerView(hello=HELLO, load=LOAD, state="live")
    metrics.fleet.update(router_pb2.FleetView(workers=[worker]))
    return list(metrics.fleet_registry.collect())


def worker_metrics() -> list[Metric]:
    """Return the metrics of a prefill or decode worker."""
    metrics = WorkerMetrics(HELLO)
    metrics.load = LOAD
    return list(metrics.collect())


async def router_metrics() -> list[Metric]:
    """Return the metrics of a router."""
    core = RouterCore("secret", Rules(), 1)  # type: ignore[arg-type]
    for hello in (HELLO, PREFILL):
        worker, _ = core.fleet.join(hello, 0.0)
        worker.report(LOAD)
        core.dispatcher.joined(worker)
    core.deaths["x", "decode"] = 1
    core.dispatcher.queue_waits["x"] = Observations(QUEUE_WAITS_S)
    dispatcher, compatibility = core.dispatcher, core.dispatcher.placer.compatibility
    for counts in (
        dispatcher.outcomes,
        dispatcher.prefills,
        dispatcher.placer.reasons,
        dispatcher.migrations.failed,
        compatibility.incompatible,
        compatibility.inexact,
    ):
        counts.setdefault("x", 0)
    metrics = list(RouterMetrics(core).collect())
    await core.close()
    return metrics


def picker_metrics() -> list[Metric]:
    """Return the metrics of an endpoint picker."""
    metrics = PickerMetrics()
    metrics.decided("x", 0.0)
    return list(metrics.collect())


def exported() -> dict[str, list[Metric]]:
    """Return the metrics by the section title of their exporter."""
    return {
        "Every process": process_metrics(),
        "Gateway": gateway_metrics(),
        "Fleet: a gateway, unless `--no-fleet-metrics`": fleet_metrics(),
        "Prefill and decode workers": worker_metrics(),
        "Router": asyncio.run(router_metrics()),
        "Endpoint picker": picker_metrics(),
    }


def names() -> set[str]:
    """Return the names of all metrics."""
    return {metric.name for metric in chain(*exported().values())}


def labels(metric: Metric) -> list[str]:
    """Return the labels in the order of the code, without the `le` of histogram buckets."""
    first = next((s for s in metric.samples if not s.name.endswith("_created")), None)
    assert first is not None, f"{metric.name} has no sample, so its labels are unknown"
    return [label for label in first.labels if label != "le"]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def page() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    rows = ("| metrics of | sum over | result |", "|---|---|---|", *map(_row, SUMS))
    yield HEAD.replace("{sums}", "\n".join(rows)).rstrip()
    for title, metrics in exported().items():
        yield f"\n## {title}\n"
        yield "| metric | type | labels | |"
        yield "|---|---|---|---|"
        for metric in sorted(metrics, key=lambda metric: metric.name):
            shown = ", ".join(f"`{label}`" for label in labels(metric))
            text = metric.documentation.rstrip(".").replace("|", "\\|")
            yield f"| `{metric.name}` | {metric.type} | {shown} | {text} |"


if __name__ == "__main__":
    print(page(), end="")
