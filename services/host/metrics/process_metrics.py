"""Metrics that every process exports about itself: build, resource use (as prometheus_client names
it), event loop lag, and expiry of certificates."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata, resources
from math import ceil

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.services.host.auth.certificates import ends_of
from pdserve.services.host.auth.tls import read_pem
from pdserve.services.host.metrics.metrics_http import MetricsHttp
from pdserve.services.host.options import CertificateSettings, ProbedSettings

LOOK_S = 0.25  # between two measurements of the event loop
COMMIT_FILE = "commit.txt"  # in the package; images have it (Dockerfile)
_LAG_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def commit() -> str:
    """The commit of this build's sources, or their digest; empty if the build did not record it."""
    try:
        return resources.files("pdserve").joinpath(COMMIT_FILE).read_text().strip()
    except OSError:
        return ""


class ProcessFacts(Collector):
    """Metrics of the build and the certificates. Certificate files are read for each scrape."""

    def __init__(self, certificates: Mapping[str, str], now: Callable[[], float] = time.time):
        """`certificates`: paths of PEM files, or PEM text, by purpose."""
        self._certificates = certificates
        self._now = now
        self._build = metadata.version("pdserve"), commit()

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily(
            "pdserve_build_info", "This build, as labels; the value is 1",
            labels=("version", "commit"),
        )  # fmt: skip
        build.add_metric(self._build, 1)
        yield build
        expiry = GaugeMetricFamily(
            "pdserve_certificate_expiry_seconds",
            "Seconds until a certificate of this process expires (of several authorities: the "
            "last); negative once it has expired",
            labels=("certificate",),
        )
        for name, source in self._certificates.items():
            with suppress(OSError, ValueError):  # its user logs the failure
                ends = ends_of(read_pem(source))
                end = max(ends) if name == "cluster_ca" else ends[0]
                expiry.add_metric((name,), end - self._now())
        yield expiry


def lag_histogram(registry: CollectorRegistry) -> Histogram:
    """The histogram for `watch_loop`."""
    return Histogram(
        "pdserve_event_loop_lag_seconds",
        "Delay of a timer of the event loop, measured 4 times a second; a long delay counts once "
        "for each measurement that it displaced",
        buckets=_LAG_S,
        registry=registry,
    )


async def watch_loop(observe: Callable[[float], object]) -> None:
    """Observe the running loop's lag until cancelled. A late measurement is observed once for each
    measurement that it displaced, so a share of observations is a share of time."""
    loop = asyncio.get_running_loop()
    while True:
        due_at = loop.time() + LOOK_S
        await asyncio.sleep(LOOK_S)
        lag_s = max(0.0, loop.time() - due_at)
        for _ in range(max(1, ceil(lag_s / LOOK_S))):
            observe(lag_s)


def certificates_of(settings: CertificateSettings, client: str = "") -> dict[str, str]:
    """The certificates of a process, by purpose; `client`: the one that clients see."""
    sources = {
        "cluster": settings.cluster_cert,
        "cluster_ca": settings.cluster_ca,
        "client": client,
    }
    return {name: source for name, source in sources.items() if source}


class MetricsPort:
    """Serves the metrics of a process on a port. Construct it in the process's loop. Raises OSError
    if the port is taken."""

    def __init__(self, settings: ProbedSettings, bind: str, client: str, *collectors: Collector):
        """It listens on the host of `bind`; `client` as in `certificates_of`."""
        registry = CollectorRegistry()
        for collector in (*collectors, ProcessFacts(certificates_of(settings, client))):
            registry.register(collector)
        ProcessCollector(registry=registry)
        lag = lag_histogram(registry)
        self._http = MetricsHttp(registry, settings.metrics_port, bind)
        self.number = self._http.port
        self._watching = asyncio.create_task(watch_loop(lag.observe), name="event loop lag")

    async def close(self) -> None:
        """Stop listening."""
        self._watching.cancel()
        await asyncio.to_thread(self._http.close)
