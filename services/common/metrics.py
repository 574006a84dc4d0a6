"""Metrics that every process or every engine has, and the metrics port of processes without a web
server.

The port needs no authentication, so the number of its connections, each of which has a thread, is
limited.
"""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata, resources
from math import ceil
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import MetricsHandler
from prometheus_client.registry import Collector

from pdserve.protos.fleet_pb2 import Load, WorkerHello
from pdserve.services.common.auth.access import read_pem
from pdserve.services.common.auth.certificates import expiries_of
from pdserve.services.common.options import CertificateSettings, ProbedSettings

log = logging.getLogger(__name__)
ACCEPT_AGAIN_S = 0.1  # pause after a failure: the process may be out of descriptors
SILENT_S = 15.0  # timeout of a peer that neither sends nor reads
MAX_CONNECTIONS = 16  # a further one closes the oldest; a scrape takes milliseconds
LOOK_S = 0.25  # between two measurements of the event loop
COMMIT_FILE = "commit.txt"  # in the package; images have it (Dockerfile)
_LAG_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
MetricKind = type[GaugeMetricFamily] | type[CounterMetricFamily]
# (label values, hello, load) of a worker
Worker = tuple[Sequence[str], WorkerHello, Load]


class MetricsHttp:
    """An HTTP server that serves the metrics of a registry from a daemon thread until closed. It
    listens on the host of `bind` (host:port) at `port`; port 0 selects a free one. Raises OSError
    if the port is taken."""

    def __init__(self, registry: CollectorRegistry, port: int, bind: str = "127.0.0.1:0") -> None:
        host = bind.rpartition(":")[0].strip("[]")
        self._server = _Server(host, port, _Handler.factory(registry))
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()
        self.port: int = self._server.server_address[1]

    def close(self) -> None:
        """Stop listening, and wait until the thread has ended."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(MetricsHandler):
    server_version, sys_version = "pdserve", ""

    def setup(self) -> None:
        self.request.settimeout(SILENT_S)
        super().setup()

    def do_GET(self) -> None:
        if urlsplit(self.path).path == "/metrics":
            # Always the text format, as on gateways: in OpenMetrics the library writes the colon of
            # vLLM's names as an underscore for a scraper that does not request UTF-8.
            del self.headers["Accept"]
            super().do_GET()
        else:
            self.send_error(404)


class _Server(ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 2 * MAX_CONNECTIONS  # further peers retry after 1 s, by their kernel
    allow_reuse_address = True

    def __init__(self, host: str, port: int, handler: Any) -> None:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self.address_family, _, _, _, address = infos[0]
        self._open: dict[Any, None] = {}  # connections, the oldest first
        self._lock = threading.Lock()  # guards `_open`: each connection has a thread
        self._failing = ""  # why no connection can be accepted
        super().__init__(address, handler)  # type: ignore[arg-type]  # of either family

    def get_request(self) -> Any:
        """Accept a connection. Raises OSError if that fails; the server loop then tries again.
        Waits before it raises and logs a repeated failure once, since without free file descriptors
        every try fails at once."""
        try:
            accepted = super().get_request()
        except OSError as error:
            if str(error) != self._failing:
                self._failing = str(error)
                log.warning("the metrics port cannot accept a connection: %s; retrying", error)
            time.sleep(ACCEPT_AGAIN_S)
            raise
        self._failing = ""
        return accepted

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            crowded = len(self._open) >= MAX_CONNECTIONS
            oldest = next(iter(self._open)) if crowded else None
            self._open.pop(oldest, None)
            self._open[request] = None
        if oldest is not None:
            with suppress(OSError):  # it has just closed by itself
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection: if they were logged, peers without credentials could fill
        the log."""


def commit() -> str:
    """Return the git commit from which this package was built, or a digest of its sources; empty if
    the build did not record it."""
    try:
        return resources.files("pdserve").joinpath(COMMIT_FILE).read_text().strip()
    except OSError:
        return ""


class ProcessFacts(Collector):
    """A collector of metrics about this process: its version and commit, and when its certificates
    expire. Certificate files are read for each scrape."""

    def __init__(self, certificates: Mapping[str, str], now: Callable[[], float] = time.time):
        """`certificates` are the paths of PEM files, or PEM text, by purpose (the metric's
        label)."""
        self._certificates = certificates
        self._now = now
        self._build = metadata.version("pdserve"), commit()

    def collect(self) -> Iterator[Metric]:
        yield family(
            GaugeMetricFamily,
            "pdserve_build_info",
            "This build, as labels; the value is 1",
            ("version", "commit"),
            [(self._build, 1)],
        )
        seconds = []
        for name, source in self._certificates.items():
            with suppress(OSError, ValueError):  # its user logs the failure
                ends = expiries_of(read_pem(source))
                end = max(ends) if name == "cluster_ca" else ends[0]
                seconds.append(((name,), end - self._now()))
        yield family(
            GaugeMetricFamily,
            "pdserve_certificate_expiry_seconds",
            "Seconds until a certificate of this process expires (of several authorities: the "
            "last); negative once it has expired",
            ("certificate",),
            seconds,
        )


def lag_histogram(registry: CollectorRegistry) -> Histogram:
    """Create the histogram of the event loop's lag, which `watch_loop` fills."""
    return Histogram(
        "pdserve_event_loop_lag_seconds",
        "Delay of a timer of the event loop, measured 4 times a second; a long delay counts once "
        "for each measurement that it displaced",
        buckets=_LAG_S,
        registry=registry,
    )


async def watch_loop(observe: Callable[[float], object]) -> None:
    """Measure the lag of the running event loop until cancelled; `observe` receives it in seconds.
    A measurement that is late by several intervals is passed once for each, so that a share of
    observations is a share of time."""
    loop = asyncio.get_running_loop()
    while True:
        due_at = loop.time() + LOOK_S
        await asyncio.sleep(LOOK_S)
        lag_s = max(0.0, loop.time() - due_at)
        for _ in range(max(1, ceil(lag_s / LOOK_S))):
            observe(lag_s)


def certificates_of(settings: CertificateSettings, client: str = "") -> dict[str, str]:
    """Return the configured certificates of a process by purpose (cluster, cluster_ca, client).
    `client` is the certificate that clients see."""
    sources = {
        "cluster": settings.cluster_cert,
        "cluster_ca": settings.cluster_ca,
        "client": client,
    }
    return {name: source for name, source in sources.items() if source}


class MetricsPort:
    """Serves the metrics of this process, including its event loop's lag, over HTTP at
    `settings.metrics_port`. Construct it in the process's event loop. Raises OSError if the port is
    taken."""

    def __init__(self, settings: ProbedSettings, bind: str, client: str, *collectors: Collector):
        """Listen on the host of `bind` (host:port). `client` is the certificate that clients see;
        its expiry becomes a metric."""
        registry = CollectorRegistry()
        for collector in (*collectors, ProcessFacts(certificates_of(settings, client))):
            registry.register(collector)
        ProcessCollector(registry=registry)
        lag = lag_histogram(registry)
        self._http = MetricsHttp(registry, settings.metrics_port, bind)
        self.number = self._http.port
        self._watching = asyncio.create_task(watch_loop(lag.observe), name="event loop lag")

    async def close(self) -> None:
        """Stop listening and measuring."""
        self._watching.cancel()
        await asyncio.to_thread(self._http.close)


def kv_usage(load: Load) -> float:
    """Return the share of a worker's KV blocks that requests hold, from 0 to 1. Blocks that only
    the prefix cache holds count as free, since they can be evicted."""
    held = load.blocks_used + load.blocks_reserved
    return held / load.blocks_total if load.blocks_total else 0.0


def family(
    kind: MetricKind,
    name: str,
    text: str,
    labels: Sequence[str],
    samples: Iterable[tuple[Sequence[str], float]],
) -> Metric:
    """Make a metric of type `kind` (gauge or counter) with the samples (label values, value)."""
    metric = kind(name, text, labels=labels)
    for label_values, value in samples:
        metric.add_metric(label_values, value)
    return metric


def engine_metrics(labels: Sequence[str], workers: Iterable[Worker]) -> Iterator[Metric]:
    """Yield the engine metrics that vLLM has too, under vLLM's names, with one sample per worker.
    Both the workers' metrics ports and the gateways use it, so that a name has the same meaning in
    both."""
    rows = list(workers)
    for name, text, field in (
        ("num_requests_running", "Requests in the batch", "running"),
        ("num_requests_waiting", "Requests that wait to enter the batch", "waiting"),
    ):
        samples = [(values, getattr(load, field)) for values, _, load in rows]
        yield family(GaugeMetricFamily, f"vllm:{name}", text, labels, samples)
    name, text = (
        "vllm:kv_cache_usage_perc",
        "Share of the KV blocks that requests hold, from 0 to 1",
    )
    samples = [(values, kv_usage(load)) for values, _, load in rows]
    yield family(GaugeMetricFamily, name, text, labels, samples)
    for name, text, field in (
        ("num_preemptions", "Preemptions", "preemptions"),
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", "prefix_queries"),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache", "prefix_hits"),
    ):
        samples = [(values, getattr(load, field)) for values, _, load in rows]
        yield family(CounterMetricFamily, f"vllm:{name}", text, labels, samples)
    yield family(
        GaugeMetricFamily,
        "vllm:cache_config_info",
        "Tokens per KV block and number of blocks, as labels; the value is 1",
        (*labels, "block_size", "num_gpu_blocks"),
        [
            ((*values, str(hello.block_size), str(load.blocks_total)), 1)
            for values, hello, load in rows
            if load.blocks_total
        ],
    )
