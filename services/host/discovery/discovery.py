"""The addresses behind a list of targets, each asked of its own resolver: DNS or Kubernetes.

docs/discovery.md says what each failure does.
"""

import logging
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from pdserve.services.host.discovery.target import parse_kubernetes

log = logging.getLogger(__name__)


class Resolver(Protocol):
    """Knows the addresses of one target."""

    def addresses(self) -> list[str]:
        """host:port of each now, sorted. May wait for the network."""

    def close(self) -> None:
        """Ask nobody any more; returns at once."""


class DnsResolver:
    """A host:port, whose host is an address or is looked up by each call."""

    def __init__(self, name: str) -> None:
        self._name = name

    def addresses(self) -> list[str]:
        return resolve(self._name)

    def close(self) -> None:
        pass


class Discovery:
    """Finds the processes that targets stand for. One thread at a time may call `look`."""

    def __init__(
        self,
        option: str,
        targets: Sequence[str],
        on_change: Callable[[], None],
        *,
        ready_only: bool,
    ) -> None:
        """`option` is where the targets are from, for errors. `on_change` is called, from any
        thread, when a look would find something else; not for DNS, which tells nobody.
        `ready_only`: without those that Kubernetes calls not ready. Raises ValueError for a target
        that cannot be."""
        self._resolvers = {
            target: _make_resolver(option, target, on_change, ready_only) for target in targets
        }

    def look(self) -> dict[str, list[str]]:
        """Addresses by target; may wait for the network."""
        return {target: resolver.addresses() for target, resolver in self._resolvers.items()}

    def close(self) -> None:
        """Ask nobody any more; returns at once."""
        for resolver in self._resolvers.values():
            resolver.close()


def _make_resolver(
    option: str, target: str, on_change: Callable[[], None], ready_only: bool
) -> Resolver:
    found = parse_kubernetes(target)
    if found is None:
        return DnsResolver(target)
    # ssl and http.client take 30 ms, and few processes need them.
    from pdserve.services.host.discovery.kubernetes import EndpointSliceWatch

    try:
        return EndpointSliceWatch(found, on_change, ready_only)
    except ValueError as error:
        raise ValueError(f"{option} {target}: {error}") from None


def resolve(name: str) -> list[str]:
    """The addresses that host:port stands for now; empty if it cannot be resolved."""
    host, _, port = name.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        log.debug("%s: %s", name, error)
        return []
    hosts = {str(address[4][0]) for address in found}
    return sorted(f"[{h}]:{port}" if ":" in h else f"{h}:{port}" for h in hosts)
