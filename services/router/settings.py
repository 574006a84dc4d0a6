"""Options of the router."""

from dataclasses import dataclass

from pdserve.services.host.options import HostSettings, option


@dataclass(frozen=True)
class RouterSettings(HostSettings):
    """Where it listens, when it separates prefill from decode, and what it bounds."""

    bind: str = option("127.0.0.1:0", "host:port of the gRPC server; port 0: any free one")
    api_keys: tuple[str, ...] = option(
        (),
        "keys that gRPC clients of Generate may use instead of the secret",
        secret=True,
        flag="api-key",
    )
    remote_prefill: str = option(
        "auto",
        "prompts that a prefill worker computes; auto: from the threshold on, and shorter ones "
        "that would hold up decode's streams for longer than a hand-off does",
        choices=("auto", "always", "never"),
    )
    remote_prefill_threshold: int = option(
        512, "prompt tokens not cached at decode from which auto goes remote in any case", min=1
    )
    allow_mixed_weights: bool = option(
        False, "pair and resume across formats of the same model too; marked inexact"
    )
    allow_mixed_numerics: bool = option(
        False, "pair and resume across numerics ids of the same weights too; marked inexact"
    )
    max_queued: int = option(
        512, "requests waiting in the router for a worker; more are refused", min=0
    )
    queue_timeout_s: float = option(
        60.0, "longest wait of a Generate for its first step", min=0.001, max=86400
    )
    request_timeout_s: float = option(
        600.0, "longest run of a Generate that names none", min=0.001, max=86400
    )
    max_buffer_bytes: int = option(
        1 << 20, "unread bytes of an answer of Generate that are kept", min=1024
    )
    stall_timeout_s: float = option(
        30.0, "seconds a client of Generate may stop reading before it is cancelled", min=0.001
    )
    metrics_port: int = option(0, "port of Prometheus metrics; 0: none", min=0, max=65535)
    trace_dir: str = option("", "folder of the rings that note hand-offs; empty: none")
    trace_mb: int = option(2, "size of a ring in MiB; 0: none", min=0, max=32)
