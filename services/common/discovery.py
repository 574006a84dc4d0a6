"""Resolves targets to addresses by DNS or Kubernetes, and orders addresses by rendezvous hashing.

docs/discovery.md describes the effect of each failure. All processes that know the same addresses
order them identically for a key. Adding or removing an address keeps the order of the others, so if
each key uses the first K of N addresses, a change of one address moves a share K/N of the keys
(Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998).
"""

import hashlib
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pdserve.services.common.endpoint_slices import parse_kubernetes

log = logging.getLogger(__name__)


class Resolver(Protocol):
    """Interface that resolves one target to the addresses of its processes."""

    def addresses(self) -> list[str]:
        """Return the current host:port of each process of the target, sorted. May wait for the
        network."""

    def close(self) -> None:
        """Stop resolving: send no more requests. Returns at once."""


class DnsResolver:
    """Resolves a target host:port by DNS. A host name is looked up again at each call."""

    def __init__(self, name: str) -> None:
        self._name = name

    def addresses(self) -> list[str]:
        return resolve(self._name)

    def close(self) -> None:
        pass


class Discovery:
    """Finds the addresses of the processes behind targets. Only one thread at a time may call
    `look`."""

    def __init__(
        self,
        option: str,
        targets: Sequence[str],
        on_change: Callable[[], None],
        *,
        ready_only: bool,
    ) -> None:
        """`option` is the name of the option that holds the targets; error messages name it.
        `on_change` is called, from any thread, when `look` would return a different result; it is
        never called for DNS targets, since DNS sends no notifications. `ready_only` excludes
        processes that are not ready according to Kubernetes. Raises ValueError if a target is
        malformed."""
        self._resolvers = {
            target: _make_resolver(option, target, on_change, ready_only) for target in targets
        }

    def look(self) -> dict[str, list[str]]:
        """Return the current addresses (host:port) of each target. May wait for the network."""
        return {target: resolver.addresses() for target, resolver in self._resolvers.items()}

    def close(self) -> None:
        """Stop resolving: send no more requests. Returns at once."""
        for resolver in self._resolvers.values():
            resolver.close()


def _make_resolver(
    option: str, target: str, on_change: Callable[[], None], ready_only: bool
) -> Resolver:
    kubernetes_target = parse_kubernetes(target)
    if kubernetes_target is None:
        return DnsResolver(target)
    # Importing ssl and http.client takes 30 ms, and few processes need them.
    from pdserve.services.common.kubernetes import EndpointSliceWatch

    try:
        return EndpointSliceWatch(kubernetes_target, on_change, ready_only)
    except ValueError as error:
        raise ValueError(f"{option} {target}: {error}") from None


def resolve(name: str) -> list[str]:
    """Look up a host:port by DNS; return its current addresses, sorted, or an empty list if the
    lookup fails."""
    host, _, port = name.rpartition(":")
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        log.debug("%s: %s", name, error)
        return []
    hosts = {str(address[4][0]) for address in infos}
    return sorted(f"[{h}]:{port}" if ":" in h else f"{h}:{port}" for h in hosts)


def check_targets(option: str, targets: Sequence[str]) -> None:
    """Raise ValueError, which names the option, if a target is malformed."""
    for target in targets:
        try:
            parse_kubernetes(target)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from None


def weight(key: bytes, address: str) -> bytes:
    """Return the rendezvous weight of an address for a key of at most 64 bytes. The address with
    the highest weight comes first in the key's order."""
    return hashlib.blake2b(address.encode(), digest_size=8, key=key).digest()


def rendezvous_order(key: bytes, addresses: Iterable[str]) -> list[str]:
    """Return the distinct addresses in the key's rendezvous order: by descending weight."""
    return sorted(set(addresses), key=lambda a: (weight(key, a), a), reverse=True)


def first_that_count(order: Iterable[str], num: int, counts: Callable[[str], bool]) -> list[str]:
    """Return the shortest prefix of `order` that contains `num` addresses for which `counts` is
    true; all of `order` if it has fewer such addresses."""
    prefix = []
    for address in order:
        if num <= 0:
            break
        prefix.append(address)
        num -= counts(address)
    return prefix
