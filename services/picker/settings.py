"""Options of the endpoint picker."""

from dataclasses import dataclass

from pdserve.gateway.settings import PromptSettings
from pdserve.services.common.discovery import check_targets
from pdserve.services.common.options import ProbedSettings, option


@dataclass(frozen=True)
class PickerSettings(PromptSettings, ProbedSettings):
    """Where it listens, which endpoints it chooses among, and which routers it queries."""

    bind: str = option("127.0.0.1:9002", "host:port for proxies (ext_proc, gRPC)")
    routers: tuple[str, ...] = option(
        (),
        "host:port of routers, whose policy chooses; names are resolved repeatedly; or "
        "kubernetes:///SERVICE:PORT (docs/discovery.md)",
    )
    endpoints: tuple[str, ...] = option(
        (),
        "host:port of the gateways that requests may go to; names are resolved repeatedly; or "
        "kubernetes:///SERVICE:PORT (docs/discovery.md); none: those that the proxy names in "
        "each request (x-gateway-destination-endpoint-subset)",
    )
    fallbacks: int = option(
        0, "further endpoints that the proxy may try; not every proxy supports a list", min=0
    )
    decide_timeout_s: float = option(
        0.15,
        "seconds for a decision, after which any ready endpoint is chosen; Envoy waits 0.2 s",
        min=0.001,
        max=60,
    )
    conformance_headers: bool = option(
        False,
        "support the headers of the Inference Extension's conformance tests, with which any client "
        "can choose its endpoint",
    )

    def __post_init__(self) -> None:
        check_targets("--routers", self.routers)
        check_targets("--endpoints", self.endpoints)
