"""Options of the processes. Each dataclass field is an option, from which its flag, environment
variable and YAML key derive.
"""

from dataclasses import dataclass

from pdserve.engine.api.config import option as option

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
GRACE_S = 1.0  # time for calls to end by themselves, after the drain
STOP_S = 5.0  # time for gRPC to stop, after that
ECHO_S = 0.3  # a terminal, a parent and the system may each signal the same stop


@dataclass(frozen=True)
class CertificateSettings:
    """Options for the certificates that the processes of a cluster show each other."""

    cluster_ca: str = option("", "PEM file of the authority that signs the cluster's certificates")
    cluster_cert: str = option("", "PEM file of this process's certificate, which names its role")
    cluster_key: str = option("", "PEM file of that certificate's key")


@dataclass(frozen=True)
class ServerSettings(CertificateSettings):
    """Options that gateway, router and workers have in common: authentication between processes,
    tracing, draining and logs."""

    cluster_secret: tuple[str, ...] = option(
        (),
        "secret of all internal connections on one machine, at least 32 bytes; of several, the "
        "first is sent and all are accepted",
        secret=True,
    )
    trust_network: bool = option(
        False,
        "allow the cluster secret, prompts and KV tickets to cross this network in plain text; for "
        "networks inside one machine, such as docker compose's",
    )
    otlp_traces_endpoint: str = option(
        "",
        "URL of an OpenTelemetry collector that accepts traces over HTTP, e.g. "
        "http://127.0.0.1:4318; empty: the URL in OTEL_EXPORTER_OTLP_ENDPOINT, if any",
    )
    otlp_traces_sample: float = option(
        1.0,
        "share of traces that are recorded, of those that begin here or that clients sample",
        min=0,
        max=1,
    )
    drain_s: float = option(
        30.0, "seconds that running requests may take to finish at a stop", min=0
    )
    log_level: str = option("info", "lowest severity that is logged", choices=LOG_LEVELS)
    log_format: str = option(
        "text", "format of log lines; json: one object per line", choices=LOG_FORMATS
    )


@dataclass(frozen=True)
class ProbedSettings(ServerSettings):
    """Options that the processes without a web server have in common: ports for health probes and
    metrics."""

    probe_port: int = option(
        0, "port of gRPC health checks that need no certificate; 0: none", min=0, max=65535
    )
    metrics_port: int = option(0, "port of Prometheus metrics; 0: none", min=0, max=65535)


@dataclass(frozen=True)
class BackendSettings(ProbedSettings):
    """Options that router and workers have in common: ports for probes and metrics, and the files
    in which they record KV hand-offs."""

    trace_dir: str = option("", "folder of the ring files that record KV hand-offs; empty: none")
    trace_mb: int = option(
        2, "size of a ring file of hand-off records in MiB; 0: none", min=0, max=32
    )


@dataclass(frozen=True)
class KeySettings(ServerSettings):
    """Options that the processes which check clients' API keys have in common: the keys, and TLS
    for clients."""

    api_keys: tuple[str, ...] = option(
        (), "API keys of clients; none: all clients are accepted", secret=True, flag="api-key"
    )
    api_key_file: str = option(
        "", "file with further API keys, one per line; reloaded when it changes and at SIGHUP"
    )
    shared_prefix: bool = option(
        False, "share the prefix cache between API keys; clients can then detect what is in it"
    )
    tls_cert: str = option("", "PEM file of the certificate that clients see; empty: no TLS")
    tls_key: str = option("", "PEM file of that certificate's key")


@dataclass(frozen=True)
class PublicSettings(KeySettings):
    """Options that the processes to which clients connect have in common: API keys, TLS and rate
    limits."""

    requests_per_minute: int = option(0, "requests per API key and minute; 0: no limit", min=0)
    tokens_per_minute: int = option(
        0, "tokens of prompts and answers per API key and minute; 0: no limit", min=0
    )
    rate_storage: str = option(
        "memory://",
        "storage of the rate limits' counts; sqlite:///FILE to share them between the gateways and "
        "routers of one host, redis://host:port between those of several hosts",
        secret=True,
    )
