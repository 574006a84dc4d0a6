"""What an entry of --routers or --endpoints says: host:port, or a Service by its EndpointSlices."""

import re
from collections.abc import Sequence
from typing import NamedTuple

KUBERNETES = "kubernetes://"
_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_SERVICE = re.compile(
    rf"kubernetes://(?P<namespace>{_LABEL})?/(?P<service>{_LABEL})(?::(?P<port>{_LABEL}))?"
)


class KubernetesTarget(NamedTuple):
    """One port of a Service."""

    namespace: str  # empty: the pod's own
    service: str
    port: str  # name or number; empty: its only one


def parse_kubernetes(target: str) -> KubernetesTarget | None:
    """None for host:port. Raises ValueError for what is neither."""
    if found := _SERVICE.fullmatch(target):
        return KubernetesTarget(found["namespace"] or "", found["service"], found["port"] or "")
    if "://" in target or not re.fullmatch(r".+:\d+", target):
        raise ValueError(
            f"{target!r} is neither host:port nor kubernetes://[namespace]/service[:port]"
        )
    return None


def check_targets(option: str, targets: Sequence[str]) -> None:
    """Raises ValueError that names the option."""
    for target in targets:
        try:
            parse_kubernetes(target)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from None
