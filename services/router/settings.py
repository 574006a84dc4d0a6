"""Options of the router process."""

from dataclasses import dataclass

from pdserve.services.common.options import BackendSettings, PublicSettings, option


@dataclass(frozen=True)
class RouterSettings(PublicSettings, BackendSettings):
    """Options of the router: its addresses, which prompts a prefill worker computes, and limits of
    requests."""

    bind: str = option("127.0.0.1:0", "host:port of the gRPC server; port 0: any free port")
    client_bind: str = option(
        "",
        "host:port that serves Generate and ListModels to callers outside the cluster; empty: "
        "--bind serves them, which with certificates accepts only processes of the cluster",
    )
    remote_prefill: str = option(
        "auto",
        "which prompts a prefill worker computes; auto: those from --remote-prefill-threshold on, "
        "and shorter ones that would delay decode's streams longer than a hand-off does",
        choices=("auto", "always", "never"),
    )
    remote_prefill_threshold: int = option(
        512, "uncached prompt tokens from which --remote-prefill auto always goes remote", min=1
    )
    allow_mixed_weights: bool = option(
        False,
        "pair workers and resume requests across weight formats of the same model; answers are "
        "marked inexact",
    )
    allow_mixed_numerics: bool = option(
        False,
        "pair workers across numerics ids of the same weights; answers are marked inexact",
    )
    exact_only: bool = option(
        False,
        "end a stream with an error instead of continuing it inexactly when no worker of its "
        "numerics id remains",
    )
    max_queued: int = option(
        512, "requests that may wait in the router for a worker; more are refused", min=0
    )
    prefix_index_hashes: int = option(
        4 << 20,
        "distinct KV blocks of all workers' prefix caches that the router tracks, at 20 to 30 "
        "bytes each; it ignores further blocks",
        min=0,
        max=1 << 28,
    )
    queue_timeout_s: float = option(
        60.0, "seconds that a Generate call may wait for its first step", min=0.001, max=86400
    )
    request_timeout_s: float = option(
        600.0,
        "seconds that a Generate call may run; a call may set a shorter timeout",
        min=0.001,
        max=86400,
    )
    max_generate_bytes: int = option(
        128 << 20, "bytes of all open Generate requests; more are refused", min=1024
    )
    max_buffer_bytes: int = option(
        1 << 20, "bytes of a Generate answer that the router buffers for its client", min=1024
    )
    stall_timeout_s: float = option(
        30.0,
        "seconds that a client of Generate may stop reading before its call is cancelled",
        min=0.001,
    )

    def __post_init__(self) -> None:
        if (self.tls_cert or self.tls_key) and not self.client_bind:
            raise ValueError(
                "the router uses --tls-cert and --tls-key only for the address --client-bind; set "
                "--client-bind too"
            )
