"""The fleet as in the gateway's /metrics, and the changes between two snapshots. Pure."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

BLOCK_STATES = ("used", "reserved", "cached", "free", "total")


@dataclass(slots=True)
class WorkerStats:
    """One worker; counters run from its start."""

    role: str = ""
    model: str = ""
    address: str = ""
    state: str = ""
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prefix_queries: float = 0.0
    prefix_hits: float = 0.0
    transfer_bytes: float = 0.0
    blocks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BLOCK_STATES, 0))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The contents of /metrics at one time; counters run from the gateway's start."""

    workers: Mapping[str, WorkerStats]
    requests: Mapping[str, int]  # in the gateway, by state
    output_tokens: float
    prompt_tokens: float
    ended: float
    failures: float


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second between two snapshots."""

    output_tokens: float = 0.0
    prompt_tokens: float = 0.0
    requests: float = 0.0
    transfer_bytes: Mapping[str, float] = field(default_factory=dict)  # by worker


_WORKER_GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
}


def parse_snapshot(text: str) -> Snapshot:
    """Parse metrics. Raises ValueError if the text is not in Prometheus' format."""
    workers: defaultdict[str, WorkerStats] = defaultdict(WorkerStats)
    requests: dict[str, int] = {}
    sums: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels, name, value = sample.labels, sample.name, sample.value
            if name == "pdserve_gateway_requests":
                requests[labels["state"]] = int(value)
            elif "worker" in labels:
                _add_sample(workers[labels["worker"]], name, labels, value)
            else:
                sums[name] += value
    return Snapshot(
        dict(workers),
        requests,
        # Each output token counts in one of the two histograms.
        output_tokens=sums["vllm:time_to_first_token_seconds_count"]
        + sums["vllm:inter_token_latency_seconds_count"],
        prompt_tokens=sums["vllm:prompt_tokens_total"],
        ended=sums["vllm:e2e_request_latency_seconds_count"],
        failures=sums["pdserve_request_failures_total"],
    )


def _add_sample(worker: WorkerStats, name: str, labels: Mapping[str, str], value: float) -> None:
    worker.address = labels["worker"]
    if name in _WORKER_GAUGES:
        kind = type(getattr(worker, _WORKER_GAUGES[name]))
        setattr(worker, _WORKER_GAUGES[name], kind(value))
    elif name == "pdserve_worker_silent_seconds":
        worker.role, worker.model = labels["role"], labels["model_name"]
        worker.state = labels["state"]
    elif name == "pdserve_kv_blocks":
        worker.blocks[labels["state"]] = int(value)
    elif name == "pdserve_transfer_bytes_total":
        worker.transfer_bytes += value


def rates(previous: Snapshot, current: Snapshot, seconds: float) -> Rates:
    """Rates between two snapshots; 0 for counters that a restart has reset."""

    def per_s(old: float, new: float) -> float:
        return max(0.0, new - old) / seconds

    return Rates(
        per_s(previous.output_tokens, current.output_tokens),
        per_s(previous.prompt_tokens, current.prompt_tokens),
        per_s(previous.ended, current.ended),
        {
            name: per_s(previous.workers[name].transfer_bytes, worker.transfer_bytes)
            for name, worker in current.workers.items()
            if name in previous.workers
        },
    )
