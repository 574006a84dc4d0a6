"""A worker's Prometheus metrics, made from its last reported load."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pdserve.protos.fleet_pb2 import Load, WorkerHello
from pdserve.services.common.metrics import engine_metrics

BLOCK_STATES = ("free", "used", "cached", "reserved", "total", "held", "parked")


class WorkerMetrics:
    """A collector. The loop replaces `load` as a whole; the metrics thread reads it."""

    def __init__(self, hello: WorkerHello) -> None:
        self.load = Load()
        self._hello = hello
        self._worker = hello.address
        self._model = hello.card.name

    def collect(self) -> Iterator[Metric]:
        load = self.load
        yield from engine_metrics(("model_name",), [((self._model,), self._hello, load)])
        blocks = GaugeMetricFamily(
            "pdserve_kv_blocks",
            "KV blocks by state; held and parked blocks also count as used",
            labels=("worker", "state"),
        )
        for state in BLOCK_STATES:
            blocks.add_metric((self._worker, state), getattr(load, f"blocks_{state}"))
        yield blocks
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
        oldest = GaugeMetricFamily(
            "pdserve_kv_oldest_seconds",
            "Age of the oldest request with blocks in a state",
            labels=("worker", "state"),
        )
        for state, age_s in sorted(load.oldest_s.items()):
            oldest.add_metric((self._worker, state), age_s)
        yield oldest
        refused = CounterMetricFamily(
            "pdserve_refused_frames", "Frames and messages refused, by reason", labels=("reason",)
        )
        for frames in load.refused_frames:
            refused.add_metric((frames.reason,), frames.count)
        yield refused
        for name, text, value in (
            ("pdserve_promised_tokens", "Tokens promised to hand-offs", load.promised_tokens),
            ("pdserve_parked_requests", "Requests parked after a lost session", load.parked),
            ("pdserve_following_requests", "Requests waiting for others' KV", load.following),
        ):
            gauge = GaugeMetricFamily(name, text, labels=("model_name",))
            gauge.add_metric((self._model,), value)
            yield gauge
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens computed", load.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated", load.generation_tokens),
            ("pdserve_stale_messages", "Messages about ended attempts", load.stale_messages),
            (
                "pdserve_inexact_handoffs",
                "Hand-offs between different KV identities",
                load.inexact_handoffs,
            ),
            ("pdserve_adopted_requests", "Parked requests that a router resumed", load.adopted),
            (
                "pdserve_park_expired_requests",
                "Parked requests aborted because no router resumed them",
                load.park_expired,
            ),
            ("pdserve_attached_requests", "Requests that used others' KV", load.attached),
            (
                "pdserve_placed_again_requests",
                "Requests that waited for others' KV, which did not come",
                load.placed_again,
            ),
            (
                "pdserve_recomputed_tokens",
                "Generated tokens computed again",
                load.recomputed_tokens,
            ),
            ("pdserve_moved_requests", "Requests moved to another worker", load.moved_away),
            ("pdserve_stayed_requests", "Requests whose move failed", load.stayed),
            (
                "pdserve_park_evicted_requests",
                "Parked requests aborted to free their blocks",
                load.park_evicted,
            ),
        ):
            counter = CounterMetricFamily(name, text, labels=("model_name",))
            counter.add_metric((self._model,), value)
            yield counter
        yield from self._transports(load)

    def _transports(self, load: Load) -> Iterator[Metric]:
        for name, text, field in (
            ("pdserve_transfer_bytes", "KV payload moved", "bytes"),
            ("pdserve_transfer_frames", "KV frames moved", "frames"),
            (
                "pdserve_transfer_seconds",
                "Seconds spent on KV payload, including checks",
                "seconds",
            ),
            ("pdserve_transfer_refused", "Frames or connections refused", "refused"),
        ):
            counter = CounterMetricFamily(name, text, labels=("transport",))
            for transport in load.transports:
                counter.add_metric((transport.transport,), getattr(transport, field))
            yield counter
