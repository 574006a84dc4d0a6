"""The endpoints that requests may go to: which are ready, and what this picker has sent there."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from pdserve.gateway.router_client import choose
from pdserve.services.common.discovery import Discovery

log = logging.getLogger(__name__)

RESOLVE_S = 1.0  # between two lookups of the targets, unless a change is reported
MAX_MISSES = 3  # empty lookups in a row before one is believed: DNS may have failed
AVOID_S = 5.0  # an endpoint that a proxy passed over is the last choice for this long
KEEP_S = 60.0  # an endpoint that only proxies name is forgotten if not named for this long


class Endpoint:
    """An ip:port that requests can be sent to."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.num_open = 0  # open requests that this picker sent there
        self.named_at = 0.0  # when it was last a candidate
        self.used_at = 0.0
        self.avoided_until = 0.0

    @property
    def host(self) -> str:
        return host_of(self.address)

    def load(self, now: float) -> float:
        """Return the number of open requests; `now` is not used. Ended ones do not count, so that a
        returning conversation finds its endpoint."""
        return self.num_open

    def sent(self, now: float) -> None:
        """Count a request that is sent there."""
        self.num_open += 1
        self.used_at = now

    def rank(self, now: float) -> tuple[bool, float, float]:
        """Return a sort key; the least is the best for a request that fits anywhere."""
        return now < self.avoided_until, self.load(now), self.used_at


class Endpoints:
    """The endpoints that targets resolve to (docs/discovery.md); without targets, those that each
    request may go to."""

    def __init__(self, targets: Sequence[str], clock: Callable[[], float]) -> None:
        """Raises ValueError for an invalid target."""
        self._targets = tuple(targets)
        self._discovery = Discovery("--endpoints", targets, self._on_change, ready_only=True)
        self._changed = asyncio.Event()  # the targets may resolve to others now
        self._clock = clock
        self._known: dict[str, Endpoint] = {}
        self._ready: frozenset[str] = frozenset()
        self._misses = 0
        self.ready_known = asyncio.Event()  # set once the ready endpoints are known
        if not targets:
            self.ready_known.set()

    def __len__(self) -> int:
        return len(self._known)

    async def keep(self) -> None:
        """Resolve the targets repeatedly, until cancelled."""
        self._loop = asyncio.get_running_loop()
        try:
            while self._targets:
                self._changed.clear()
                resolved = await asyncio.to_thread(self._discovery.look)
                self.set_resolved(
                    {address for addresses in resolved.values() for address in addresses}
                )
                with suppress(TimeoutError):
                    async with asyncio.timeout(RESOLVE_S):
                        await self._changed.wait()
            await asyncio.Event().wait()
        finally:
            self._discovery.close()

    def _on_change(self) -> None:
        """The targets may resolve to other addresses now; called from any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._changed.set)

    def set_resolved(self, addresses: Iterable[str]) -> None:
        """Replace the ready endpoints."""
        ready = frozenset(addresses)
        self._misses = 0 if ready else self._misses + 1
        if not ready and self._ready and self._misses < MAX_MISSES:
            return
        if ready != self._ready:
            log.info("%d endpoints are ready", len(ready))
        self._ready = ready
        if ready:
            self.ready_known.set()

    def candidates(self, hint: Sequence[str] | None) -> list[Endpoint]:
        """Return ready endpoints. `hint`: the only ones allowed, as ip:port, or an ip alone for
        each of its ports; None allows all."""
        now = self._clock()
        addresses = self._allowed(hint)
        if addresses - self._known.keys():
            self._forget_unused(now)
        return [self._endpoint(address, now) for address in sorted(addresses)]

    def _allowed(self, hint: Sequence[str] | None) -> frozenset[str]:
        if hint is None:
            return self._ready
        if not self._targets:
            return frozenset(address for address in hint if has_port(address))
        allowed = set(hint)
        return frozenset(a for a in self._ready if a in allowed or host_of(a) in allowed)

    def _endpoint(self, address: str, now: float) -> Endpoint:
        endpoint = self._known.get(address)
        if endpoint is None:
            endpoint = self._known[address] = Endpoint(address)
        endpoint.named_at = now
        return endpoint

    def _forget_unused(self, now: float) -> None:
        for address, endpoint in list(self._known.items()):
            if (
                address not in self._ready
                and not endpoint.num_open
                and now - endpoint.named_at > KEEP_S
            ):
                del self._known[address]

    def get(self, address: str) -> Endpoint | None:
        """Return a known endpoint, if there is one with this address."""
        return self._known.get(address)


def spread(candidates: Sequence[Endpoint], key: bytes, now: float) -> list[Endpoint]:
    """Return the candidates in the order in which a request is to try them if any would do. `key`:
    of the request's conversation, which stays at one endpoint while that has no more than its
    share; empty: none."""
    order = sorted(candidates, key=lambda endpoint: endpoint.rank(now))
    usable = [endpoint for endpoint in order if now >= endpoint.avoided_until]
    preferred = choose(usable, key, now) if key else None
    return (
        order
        if preferred is None
        else [preferred, *(endpoint for endpoint in order if endpoint is not preferred)]
    )


def host_of(address: str) -> str:
    """Return the host of host:port."""
    return address.rpartition(":")[0].strip("[]")


def has_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdecimal() and ("]" in host) == (":" in host)
