"""Options of the router."""

from dataclasses import dataclass

from pdserve.services.host.options import BackendSettings, PublicSettings, option


@dataclass(frozen=True)
class RouterSettings(PublicSettings, BackendSettings):
    """Where it listens, when it separates prefill from decode, and its limits."""

    bind: str = option("127.0.0.1:0", "host:port of the gRPC server; port 0: any free one")
    client_bind: str = option(
        "",
        "host:port where Generate and ListModels are served to callers from outside the cluster; "
        "empty: at --bind, which with certificates is for the cluster alone",
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
        False, "pair across numerics ids of the same weights too; marked inexact"
    )
    exact_only: bool = option(
        False,
        "end a stream with an error, instead of going on with it inexactly, when no worker of its "
        "numerics id is left",
    )
    max_queued: int = option(
        512, "requests waiting in the router for a worker; more are refused", min=0
    )
    prefix_index_hashes: int = option(
        4 << 20,
        "different KV blocks in the workers' prefix caches that the router knows, of all workers "
        "together, at 20 to 30 bytes each; those beyond are not known",
        min=0,
        max=1 << 28,
    )
    queue_timeout_s: float = option(
        60.0, "longest wait of a Generate for its first step", min=0.001, max=86400
    )
    request_timeout_s: float = option(
        600.0, "longest run of a Generate, which may name a shorter one", min=0.001, max=86400
    )
    max_generate_bytes: int = option(
        128 << 20, "bytes of all open calls of Generate; more are refused", min=1024
    )
    max_buffer_bytes: int = option(
        1 << 20, "unread bytes of an answer of Generate that are kept", min=1024
    )
    stall_timeout_s: float = option(
        30.0, "seconds a client of Generate may stop reading before it is cancelled", min=0.001
    )

    def __post_init__(self) -> None:
        if (self.tls_cert or self.tls_key) and not self.client_bind:
            raise ValueError("a router serves --tls-cert and --tls-key at --client-bind only")
