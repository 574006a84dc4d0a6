"""Parses an entry of --routers or --endpoints: host:port, or a Service by its EndpointSlices."""

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

    namespace: str  # empty: the pod's namespace
    service: str
    port: str  # name or number; empty: the Service's only port


def parse_kubernetes(target: str) -> KubernetesTarget | None:
    """The Service that a target names; None for host:port. Raises ValueError if it is neither."""
    if match := _SERVICE.fullmatch(target):
        return KubernetesTarget(match["namespace"] or "", match["service"], match["port"] or "")
    if "://" in target or not re.fullmatch(r".+:\d+", target):
        raise ValueError(
            f"{target!r} is neither host:port nor kubernetes://[namespace]/service[:port]"
        )
    return None


def check_targets(option: str, targets: Sequence[str]) -> None:
    """Raises ValueError, naming the option, if a target is malformed."""
    for target in targets:
        try:
            parse_kubernetes(target)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from None
