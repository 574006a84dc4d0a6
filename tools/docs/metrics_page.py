"""Print docs/metrics.md, generated from the collectors.

`make docs` writes the page, tests/test_docs.py compares it. Labels are known only from samples, so
each collector gets some.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric

from pdserve.engine.kv.codec import encode_spec
from pdserve.engine.kv.spec import KvSpec
from pdserve.gateway.observability.metrics import GatewayMetrics
from pdserve.protos import common_pb2 as pb
from pdserve.protos import fleet_pb2, router_pb2
from pdserve.services.host.auth.certificates import make_authority
from pdserve.services.host.metrics.observations import Observations
from pdserve.services.host.metrics.process_metrics import ProcessFacts, lag_histogram
from pdserve.services.picker.metrics import PickerMetrics
from pdserve.services.router.core import RouterCore
from pdserve.services.router.dispatcher import QUEUE_WAITS_S
from pdserve.services.router.metrics import RouterMetrics
from pdserve.services.router.placement.policy import Rules
from pdserve.services.worker.metrics import WorkerMetrics

HEAD = """\
# Metrics

`make docs` writes this page from the code. Names that begin with `vllm:` mean what they mean in
vLLM, so that its dashboards work, but for these: a worker's `vllm:prompt_tokens` counts what was
computed, without cached tokens, and a gateway's those of answered requests;
`vllm:request_prefill_time_seconds` ends with the prompt's KV, before it is transferred;
`vllm:e2e_request_latency_seconds` ends when a request is closed; a call ends a choice as
"tool_calls", and a client that leaves is in `pdserve_request_failures`. A counter's samples end in
`_total`, a histogram's in `_bucket`, `_sum` and `_count`.

## What to scrape
`pdserve up` is one target: `/metrics` of its HTTP port, which has the gateway's figures and those
of the fleet. `pdserve top` reads it, too. So is `pdserve gateway --workers N`: whichever process is
asked has the sums of all ([gateways.md](gateways.md)).

In a cluster each process is asked for its own figures, and nobody exports another's: gateways get
`--no-fleet-metrics` (`PDSERVE_FLEET_METRICS=false`), routers and workers `--metrics-port`. With the
fleet, each gateway would count it once more. `fleet=true` in the query asks for the fleet all the
same, `fleet=false` for none.

```yaml
scrape_configs:
  - job_name: pdserve-gateways # what clients get: latencies, tokens, how requests end
    authorization: { credentials: API_KEY } # not with --open-metrics
    static_configs: [{ targets: ["gateway-1:8000", "gateway-2:8000", "gateway-3:8000"] }]
  - job_name: pdserve-workers # what engines do: batches, queues, KV blocks, transfers
    static_configs: [{ targets: ["prefill-1:9090", "decode-1:9090", "decode-2:9090"] }]
    metric_relabel_configs: # gateways count tokens, too: those of answers
      - { source_labels: [__name__], regex: "vllm:(prompt|generation)_tokens_total", action: drop }
  - job_name: pdserve-routers # decisions, queues, retries, moves, and their view of the fleet
    static_configs: [{ targets: ["router-1:9090", "router-2:9090"] }]
```

`k8s/observability` is that for Kubernetes (PodMonitors), docker-compose.observability.yml for
compose; boards and alerts are there, too, and [runbook.md](runbook.md) is about the alerts.

{sums}

Scalers read `pdserve_prefill_backlog_seconds` with the sum of the routers'
`pdserve_router_prefill_wait_seconds` (prefill), `pdserve_decode_kv_used_ratio` and
`pdserve_router_queued` (decode). The Gateway API Inference Extension reads
`vllm:num_requests_waiting`, `vllm:num_requests_running`, `vllm:kv_cache_usage_perc` and
`vllm:cache_config_info` under these names.

What prometheus_client says of a process is there as well (`process_cpu_seconds_total`,
`process_resident_memory_bytes`, `process_open_fds`, ...); with `--workers N` it is not, since each
scrape would be of another process.
"""
# The processes that a figure covers, the labels it is summed over, and the result.
SUMS = (
    (
        "gateways",
        "all gateways",
        "the system; of a histogram `sum by (le)` of the buckets, then `histogram_quantile`",
    ),
    (
        "workers",
        "all workers",
        "the system, without the tokens that gateways count under the same names",
    ),
    (
        "routers: counters, and what is in them (`pdserve_router_requests`, `_queued`, "
        "`_queue_seconds`, `_prefill_wait_seconds`, `_moving`, `_migrating`)",
        "all routers",
        "the system: a request is in one router",
    ),
    (
        "routers: what they hear of workers (`pdserve_router_workers`, `_worker_deaths`, "
        "`_frozen`, `pdserve_worker_silent_seconds`) and what scalers read of it "
        "(`pdserve_prefill_backlog_seconds`, `pdserve_decode_kv_used_ratio`)",
        "none: `max`",
        "the system; with `--join-routers` one router's part ([scale.md](scale.md))",
    ),
    ("every process", "as is asked", "a sample of each process"),
)
WHO = pb.ModelCard(name="x", kv_spec=encode_spec(KvSpec(4, ())))
HELLO = fleet_pb2.WorkerHello(role=fleet_pb2.DECODE, boot=b"x", address="x:1", card=WHO)
PREFILL = fleet_pb2.WorkerHello(role=fleet_pb2.PREFILL, boot=b"y", address="y:1", card=WHO)
LOAD = fleet_pb2.Load(
    blocks_total=1,
    prefill_tokens_s=1,
    oldest_s={"x": 1.0},
    refused_frames=[fleet_pb2.Refused(reason="x")],
    transports=[fleet_pb2.TransportCounters(transport="x")],
)
MOST_LABELS = 4
AUTHORITY = make_authority().certificate.decode()


def process_metrics() -> list[Metric]:
    """Metrics of each process, except those that prometheus_client names."""
    registry = CollectorRegistry()
    registry.register(ProcessFacts({"cluster_ca": AUTHORITY}))
    lag_histogram(registry)
    return list(registry.collect())


def gateway_metrics() -> list[Metric]:
    """The gateway's metrics."""
    metrics = GatewayMetrics()
    for metric in vars(metrics).values():
        for number in range(1, MOST_LABELS):
            with suppress(ValueError):  # it has a different number of labels
                if isinstance(metric, Counter | Gauge | Histogram):
                    metric.labels(*["x"] * number)
    metrics.itl.of("x")
    common = {metric.name for metric in process_metrics()}
    return [metric for metric in metrics.registry.collect() if metric.name not in common]


def fleet_metrics() -> list[Metric]:
    """Metrics of the fleet, exported by a gateway."""
    metrics = GatewayMetrics()
    worker = router_pb2.WorkerView(hello=HELLO, load=LOAD, state="live")
    metrics.fleet.update(router_pb2.FleetView(workers=[worker]))
    return list(metrics.fleet_registry.collect())


def worker_metrics() -> list[Metric]:
    """Metrics of a prefill or decode worker."""
    metrics = WorkerMetrics(HELLO)
    metrics.load = LOAD
    return list(metrics.collect())


async def router_metrics() -> list[Metric]:
    """Metrics of a router."""
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
    found = list(RouterMetrics(core).collect())
    await core.close()
    return found


def picker_metrics() -> list[Metric]:
    """Metrics of an endpoint picker."""
    metrics = PickerMetrics()
    metrics.decided("x", 0.0)
    return list(metrics.collect())


def exported() -> dict[str, list[Metric]]:
    """The metrics by the title of their exporter."""
    return {
        "Every process": process_metrics(),
        "Gateway": gateway_metrics(),
        "Fleet: a gateway, unless `--no-fleet-metrics`": fleet_metrics(),
        "Prefill and decode workers": worker_metrics(),
        "Router": asyncio.run(router_metrics()),
        "Endpoint picker": picker_metrics(),
    }


def names() -> set[str]:
    """The names of every metric."""
    return {metric.name for metric in chain(*exported().values())}


def labels(metric: Metric) -> list[str]:
    """The labels in the order of the code, without those of histogram buckets."""
    first = next((s for s in metric.samples if not s.name.endswith("_created")), None)
    assert first is not None, f"{metric.name} has no sample, so its labels are not known"
    return [label for label in first.labels if label != "le"]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def page() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    rows = ("| figures of | sum over | gives |", "|---|---|---|", *map(_row, SUMS))
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
