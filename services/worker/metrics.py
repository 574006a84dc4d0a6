"""A worker's Prometheus metrics, made from the worker's last load report."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pdserve.protos.fleet_pb2 import Load, WorkerHello
from pdserve.services.common.metrics import MetricKind, engine_metrics, family

BLOCK_STATES = ("free", "used", "cached", "reserved", "total", "held", "parked")
GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily
FIGURES: tuple[tuple[MetricKind, str, str, str], ...] = (  # with the field of Load
    (GAUGE, "pdserve_promised_tokens", "Tokens promised to hand-offs", "promised_tokens"),
    (GAUGE, "pdserve_parked_requests", "Requests parked after a lost session", "parked"),
    (
        GAUGE,
        "pdserve_following_requests",
        "Requests waiting for KV in transfer for another request",
        "following",
    ),
    (COUNTER, "vllm:prompt_tokens", "Prompt tokens computed", "prompt_tokens"),
    (COUNTER, "vllm:generation_tokens", "Tokens generated", "generation_tokens"),
    (COUNTER, "pdserve_stale_messages", "Messages about ended attempts", "stale_messages"),
    (
        COUNTER,
        "pdserve_inexact_handoffs",
        "KV hand-offs between workers with different KV identities",
        "inexact_handoffs",
    ),
    (COUNTER, "pdserve_adopted_requests", "Parked requests that a router resumed", "adopted"),
    (
        COUNTER,
        "pdserve_park_expired_requests",
        "Parked requests aborted because no router resumed them",
        "park_expired",
    ),
    (
        COUNTER,
        "pdserve_attached_requests",
        "Requests that waited for another request's KV and used it",
        "attached",
    ),
    (
        COUNTER,
        "pdserve_placed_again_requests",
        "Requests that waited for another request's KV, which did not arrive",
        "placed_again",
    ),
    (COUNTER, "pdserve_recomputed_tokens", "Generated tokens computed again", "recomputed_tokens"),
    (COUNTER, "pdserve_moved_requests", "Requests moved to another worker", "moved_away"),
    (COUNTER, "pdserve_stayed_requests", "Requests whose move to another worker failed", "stayed"),
    (
        COUNTER,
        "pdserve_park_evicted_requests",
        "Parked requests aborted to free their blocks",
        "park_evicted",
    ),
)
TRANSPORT_COUNTERS = (
    ("pdserve_transfer_bytes", "KV payload moved", "bytes"),
    ("pdserve_transfer_frames", "KV frames moved", "frames"),
    ("pdserve_transfer_seconds", "Seconds spent on KV payload, including checks", "seconds"),
    ("pdserve_transfer_refused", "Frames or connections refused", "refused"),
)


class WorkerMetrics:
    """A Prometheus collector of one worker's metrics. The event loop replaces `load` as a whole;
    the metrics thread reads it."""

    def __init__(self, hello: WorkerHello) -> None:
        self.load = Load()
        self._hello = hello
        self._worker = hello.address
        self._model = (hello.card.name,)

    def collect(self) -> Iterator[Metric]:
        load, by_state = self.load, ("worker", "state")
        yield from engine_metrics(("model_name",), [(self._model, self._hello, load)])
        yield family(
            GaugeMetricFamily,
            "pdserve_kv_blocks",
            "KV blocks by state; held and parked blocks also count as used",
            by_state,
            [((self._worker, state), getattr(load, f"blocks_{state}")) for state in BLOCK_STATES],
        )
        yield CounterMetricFamily(
            "pdserve_reserved_idle_block_seconds",
            "Block-seconds between the reservation of a block and the arrival of its KV",
            value=load.reserved_idle_block_s,
        )
        yield CounterMetricFamily(
            "pdserve_kv_accounting_errors",
            "Checks that found free + used + cached + reserved different from all blocks",
            value=load.accounting_errors,
        )
        yield family(
            GaugeMetricFamily,
            "pdserve_kv_oldest_seconds",
            "Age of the oldest request with blocks in a state",
            by_state,
            [((self._worker, state), age_s) for state, age_s in sorted(load.oldest_s.items())],
        )
        yield family(
            CounterMetricFamily,
            "pdserve_refused_frames",
            "Frames and messages refused, by reason",
            ("reason",),
            [((frames.reason,), frames.count) for frames in load.refused_frames],
        )
        for kind, name, text, field in FIGURES:
            yield family(kind, name, text, ("model_name",), [(self._model, getattr(load, field))])
        for name, text, field in TRANSPORT_COUNTERS:
            samples = [((item.transport,), getattr(item, field)) for item in load.transports]
            yield family(CounterMetricFamily, name, text, ("transport",), samples)
