"""vLLM's engine metrics, from a worker's hello and load.

Used by a worker's metrics port and by a gateway's view of the fleet, so that a name means the same
in both.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pdserve.protos.fleet_pb2 import Load, WorkerHello

# (label values, hello, load) of a worker
Worker = tuple[Sequence[str], WorkerHello, Load]


def kv_usage(load: Load) -> float:
    """The share of the KV blocks that requests hold; cached blocks can be evicted and count as
    free."""
    held = load.blocks_used + load.blocks_reserved
    return held / load.blocks_total if load.blocks_total else 0.0


_GAUGES: tuple[tuple[str, str, Callable[[Load], float]], ...] = (
    ("vllm:num_requests_running", "Requests in the batch", lambda load: load.running),
    (
        "vllm:num_requests_waiting",
        "Requests that wait to enter the batch",
        lambda load: load.waiting,
    ),
    (
        "vllm:kv_cache_usage_perc",
        "Share of the KV blocks that requests hold, from 0 to 1",
        kv_usage,
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[Load], float]], ...] = (
    ("vllm:num_preemptions", "Preemptions", lambda load: load.preemptions),
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache",
        lambda load: load.prefix_queries,
    ),
    (
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the prefix cache",
        lambda load: load.prefix_hits,
    ),
)


def engine_metrics(labels: Sequence[str], workers: Iterable[Worker]) -> Iterator[Metric]:
    """One family per metric, with the given labels and a sample per worker."""
    rows = list(workers)
    for name, text, value in _GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=labels)
        for label_values, _, load in rows:
            gauge.add_metric(label_values, value(load))
        yield gauge
    for name, text, value in _COUNTERS:
        counter = CounterMetricFamily(name, text, labels=labels)
        for label_values, _, load in rows:
            counter.add_metric(label_values, value(load))
        yield counter
    config = GaugeMetricFamily(
        "vllm:cache_config_info",
        "Tokens per KV block and number of blocks, as labels; the value is 1",
        labels=(*labels, "block_size", "num_gpu_blocks"),
    )
    for label_values, hello, load in rows:
        if load.blocks_total:
            config.add_metric((*label_values, str(hello.block_size), str(load.blocks_total)), 1)
    yield config
