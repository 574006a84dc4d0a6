"""The gateway's Prometheus metrics, under vLLM's names where vLLM has the metric.

The histogram of inter-token latency is a separate class, since prometheus_client's takes two locks
per observation, a tenth of the cost of a token. It exports no `_created` series.

Ownership: GatewayMetrics creates two private registries and passes them on: one for the gateway's
own metrics, and one for those of the fleet, taken from the last FleetView that
`FleetCollector.update` got.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
    values,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from pdserve.gateway.admission import AdmissionLimits
from pdserve.protos.fleet_pb2 import Role
from pdserve.protos.router_pb2 import FleetView
from pdserve.services.common.metrics import ProcessFacts, Worker, engine_metrics, lag_histogram
from pdserve.services.common.observations import Observations

_LATENCY_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
    7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


class Observer(Protocol):
    """A histogram's interface for recording values of one model."""

    def observe(self, value: float, times: int) -> None:
        """Record the same value `times` times. A value equal to a bucket's upper bound counts in
        that bucket."""


class TokenHistogram(Protocol):
    """A histogram of a value per token, with a label for the model; `of` returns the recorder of
    one model."""

    def of(self, model: str) -> Observer: ...


class MemoryHistogram(Collector):
    """A TokenHistogram in this process' memory, for a gateway of one process."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._models: dict[str, Observations] = {}  # only the event loop's thread changes it

    def of(self, model: str) -> Observer:
        observations = self._models.get(model)
        if observations is None:
            observations = self._models[model] = Observations(self._bounds)
        return observations

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=("model_name",))
        for model, observations in list(self._models.items()):
            family.add_metric((model,), observations.buckets(), observations.total)
        yield family


class FileHistogram:
    """A TokenHistogram of a gateway with several processes, for all models or (from `of`) for one
    model; prometheus_client keeps it in files that the processes share."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram

    def of(self, model: str) -> Observer:
        return FileHistogram(self._histogram.labels(model))

    def observe(self, value: float, times: int) -> None:
        for _ in range(times):
            self._histogram.observe(value)


class GatewayMetrics:
    """All Prometheus metrics of the gateway: those of its requests, labeled by model, and those of
    the fleet.

    With `folder`, several gateway processes keep their metrics in files in this folder, each under
    its `index`. Any of them exports the sums over all processes; a restarted process continues its
    counts.
    """

    def __init__(self, folder: Path | None = None, index: int = 0) -> None:
        self.registry = CollectorRegistry()
        self._exported = self.registry
        if folder is not None:
            # prometheus_client has only process-wide settings for this.
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
            values.ValueClass = values.MultiProcessValue(lambda: index)  # type: ignore[no-untyped-call]
            self._exported = CollectorRegistry()
            MultiProcessCollector(self._exported, str(folder))  # type: ignore[no-untyped-call]
        self.fleet = FleetCollector()
        self.fleet_registry = CollectorRegistry()
        self.fleet_registry.register(self.fleet)
        model = ("model_name",)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _LATENCY_S) -> Histogram:
            return Histogram(name, text, model, buckets=buckets, registry=self.registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = model) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        self.ttft = histogram(
            "vllm:time_to_first_token_seconds", "Time from a request's arrival to its first token"
        )
        itl_texts = "vllm:inter_token_latency_seconds", "Time between two tokens of one choice"
        self.itl: TokenHistogram
        if folder is None:
            self.itl = MemoryHistogram(*itl_texts, _LATENCY_S)
            self.registry.register(self.itl)
        else:
            self.itl = FileHistogram(histogram(*itl_texts))
        self.e2e = histogram(
            "vllm:e2e_request_latency_seconds", "Time from a request's arrival to its last token"
        )
        self.queue = histogram(
            "vllm:request_queue_time_seconds", "Time that a request waits for its first step"
        )
        self.prefill = histogram(
            "vllm:request_prefill_time_seconds", "Time to compute the prompt's KV"
        )
        self.transfer = histogram(
            "pdserve_request_transfer_time_seconds",
            "Time of a KV transfer that did not overlap with prefill",
        )
        self.decode = histogram(
            "vllm:request_decode_time_seconds", "Time from the first token to the last token"
        )
        self.prompt_len = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of an answered request", _TOKENS
        )
        self.generation_len = histogram(
            "vllm:request_generation_tokens", "Generated tokens of an answered request", _TOKENS
        )
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of answered requests")
        self.generation_tokens = counter(
            "vllm:generation_tokens", "Generated tokens of answered requests"
        )
        self.success = counter(
            "vllm:request_success", "Choices that ended", ("model_name", "finished_reason")
        )
        self.failures = counter(
            "pdserve_request_failures", "Requests that ended with an error", ("code",)
        )
        self.mcp_calls = counter(
            "pdserve_mcp_calls", "Tool calls to MCP servers", ("server", "tool", "outcome")
        )
        self.open = Gauge(
            "pdserve_gateway_requests", "Requests in the gateway", ("state",),
            registry=self.registry, multiprocess_mode="livesum",
        )  # fmt: skip

        self.loop_lag = lag_histogram(self.registry)

    def add_process(self, certificates: Mapping[str, str]) -> None:
        """Also export metrics of the build and of the TLS certificates (by name and file); if the
        gateway has only this process, also its memory and CPU time."""
        self._exported.register(ProcessFacts(certificates))
        if self._exported is self.registry:
            ProcessCollector(registry=self._exported)

    def show_open(self, limits: AdmissionLimits) -> None:
        """Set the gauge of requests in this gateway by state: waiting, open, and those of
        batches."""
        self.open.labels("waiting").set(limits.waiting)
        self.open.labels("open").set(limits.open)
        self.open.labels("batch").set(limits.background)

    def page(self, with_fleet: bool) -> bytes:
        """Return all metrics in the text format of Prometheus, with those of the fleet if
        `with_fleet`."""
        fleet = generate_latest(self.fleet_registry) if with_fleet else b""
        return generate_latest(self._exported) + fleet


class FleetCollector(Collector):
    """Exports the router's view of its workers (load, KV blocks, KV transfers, retries) as
    Prometheus metrics."""

    def __init__(self) -> None:
        self._view = FleetView()

    def update(self, view: FleetView) -> None:
        self._view = view

    def collect(self) -> Iterable[Metric]:
        view = self._view
        labels = ("model_name", "worker", "role")
        stale = CounterMetricFamily(
            "pdserve_stale_messages", "Messages about ended attempts", labels=labels
        )
        silent = GaugeMetricFamily(
            "pdserve_worker_silent_seconds", "Seconds since the worker's last message",
            labels=(*labels, "state"),
        )  # fmt: skip
        blocks = GaugeMetricFamily(
            "pdserve_kv_blocks",
            "KV blocks by state; held and parked blocks also count as used",
            labels=("worker", "state"),
        )
        transfers = [
            CounterMetricFamily(name, text, labels=("worker", "transport"))
            for name, text in (
                ("pdserve_transfer_bytes", "KV payload moved"),
                ("pdserve_transfer_seconds", "Seconds spent on KV payload, including checks"),
                ("pdserve_transfer_frames", "KV frames moved"),
                ("pdserve_transfer_frames_refused", "Frames or connections refused"),
            )
        ]
        rows: list[Worker] = []
        for worker in view.workers:
            hello, load = worker.hello, worker.load
            worker_labels = (hello.card.name, hello.address, Role.Name(hello.role).lower())
            rows.append((worker_labels, hello, load))
            stale.add_metric(worker_labels, load.stale_messages)
            silent.add_metric((*worker_labels, worker.state), worker.silent_s)
            for state in ("free", "used", "cached", "reserved", "total"):
                blocks.add_metric((hello.address, state), getattr(load, f"blocks_{state}"))
            for row in load.transports:
                values = (row.bytes, row.seconds, row.frames, row.refused)
                for family, value in zip(transfers, values, strict=True):
                    family.add_metric((hello.address, row.transport), value)
        prefills = CounterMetricFamily(
            "pdserve_prefill_requests", "Prompts by the place of their prefill", labels=("where",)
        )
        prefills.add_metric(("local",), view.prefill_local)
        prefills.add_metric(("remote",), view.prefill_remote)
        retries = CounterMetricFamily("pdserve_router_retries", "Second and later attempts")
        retries.add_metric((), view.retries)
        moves = CounterMetricFamily(
            "pdserve_router_moves",
            "Moves of running requests to another decode worker, by outcome",
            labels=("outcome",),
        )
        moves.add_metric(("done",), view.moves)
        moves.add_metric(("failed",), view.moves_failed)
        return [
            *engine_metrics(labels, rows),
            stale, silent, blocks, *transfers, prefills, retries, moves,
        ]  # fmt: skip
