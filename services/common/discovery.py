"""Resolves targets to addresses by DNS or Kubernetes, and orders addresses by rendezvous hash.

docs/discovery.md describes the effect of each failure. All processes that know the same names order
them identically. Adding or removing a name keeps the order of the others, so if the first K of N
are used, K of N keys move (Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit
Rates", 1998).
"""

import hashlib
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pdserve.services.common.endpoint_slices import parse_kubernetes

log = logging.getLogger(__name__)


class Resolver(Protocol):
    """Resolves the addresses of one target."""

    def addresses(self) -> list[str]:
        """The current host:port of each process, sorted. May wait for the network."""

    def close(self) -> None:
        """Stop making requests; returns at once."""


class DnsResolver:
    """Resolves host:port. A host that is a name is looked up at each call."""

    def __init__(self, name: str) -> None:
        self._name = name

    def addresses(self) -> list[str]:
        return resolve(self._name)

    def close(self) -> None:
        pass


class Discovery:
    """Finds the processes behind targets. One thread at a time may call `look`."""

    def __init__(
        self,
        option: str,
        targets: Sequence[str],
        on_change: Callable[[], None],
        *,
        ready_only: bool,
    ) -> None:
        """`option` is the option that holds the targets, for errors. `on_change` is called, from
        any thread, when `look` would return a different result; not for DNS, which sends no
        notifications. `ready_only` excludes processes that Kubernetes calls not ready. Raises
        ValueError if a target is malformed."""
        self._resolvers = {
            target: _make_resolver(option, target, on_change, ready_only) for target in targets
        }

    def look(self) -> dict[str, list[str]]:
        """Addresses by target; may wait for the network."""
        return {target: resolver.addresses() for target, resolver in self._resolvers.items()}

    def close(self) -> None:
        """Stop making requests; returns at once."""
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
    """The current addresses of host:port; empty if it cannot be resolved."""
    host, _, port = name.rpartition(":")
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        log.debug("%s: %s", name, error)
        return []
    hosts = {str(address[4][0]) for address in infos}
    return sorted(f"[{h}]:{port}" if ":" in h else f"{h}:{port}" for h in hosts)


def check_targets(option: str, targets: Sequence[str]) -> None:
    """Raises ValueError, naming the option, if a target is malformed."""
    for target in targets:
        try:
            parse_kubernetes(target)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from None


def weight(key: bytes, address: str) -> bytes:
    """Return the weight of an address for a key of at most 64 bytes; the highest weight comes
    first."""
    return hashlib.blake2b(address.encode(), digest_size=8, key=key).digest()


def rendezvous_order(key: bytes, addresses: Iterable[str]) -> list[str]:
    """Return the distinct addresses, sorted by descending weight for the key."""
    return sorted(set(addresses), key=lambda a: (weight(key, a), a), reverse=True)


def first_that_count(order: Iterable[str], num: int, counts: Callable[[str], bool]) -> list[str]:
    """Return the shortest prefix of `order` in which `counts` is true for `num` addresses; the
    whole order if there are fewer."""
    prefix = []
    for address in order:
        if num <= 0:
            break
        prefix.append(address)
        num -= counts(address)
    return prefix
