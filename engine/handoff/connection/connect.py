"""Opens the data connections of KV hand-offs: the prefill process dials, the decode process
listens.

Prefill uses the first transport that works, or the one that is configured by name. Every transport
that cannot be used is logged with the reason and counted; none is replaced silently.

At decode, a connection is unproven until its peer has sent a message whose tag shows that it knows
the secret of a ticket. At most MAX_UNPROVEN unproven connections are open, so a peer that merely
reaches the port cannot exhaust threads and memory. One more closes the oldest unproven connection
of the address that has the most of them. A prefill process proves itself within milliseconds, so a
flood of connections does not shut it out.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from pdserve.engine.handoff.connection.link import DataLink, DataLinkHandler
from pdserve.engine.handoff.protocol import HandoffCompatibility, Hello, messages
from pdserve.engine.transport import KvTransport, Listener, Target, TransportRefused, Wire

MAX_UNPROVEN = 64


class DataListeners:
    """The listening sockets of one decode process, one for each transport.

    Every accepted connection is added to `links`, which the Receiver owns. Calls
    `count("unproven_refused")` on a listener's thread for each connection that is closed because
    too many are unproven.
    """

    def __init__(
        self,
        incarnation: bytes,
        compatibility: HandoffCompatibility,
        handler: DataLinkHandler,
        links: dict[DataLink, None],
        count: Callable[[str], None],
    ) -> None:
        self.refusals: Counter[str] = Counter()  # transports that cannot listen here
        self._incarnation = incarnation
        self._compatibility = compatibility
        self._handler = handler
        self._links = links
        self._count = count
        self._listeners: list[Listener] = []

    def open(self, transports: Sequence[KvTransport], chosen: bool) -> dict[str, str]:
        """Open a listener for each transport; return transport name -> address.

        Skip a transport that cannot listen, unless it is configured by name (`chosen`): then raise
        TransportRefused. Raises OSError if an address cannot be bound.
        """
        opened = listen_all(transports, chosen, self._incarnation, self._accepted)
        self.refusals.update(t.name for t in transports if t.name not in opened)
        self._listeners += opened.values()
        return {name: listener.address for name, listener in opened.items()}

    def refusal(self, link: DataLink, hello: messages.Hello) -> str:
        """Return why decode refuses the peer that sent this Hello; empty if decode accepts it."""
        if hello.decode_incarnation != self._incarnation:
            return "the ticket names another decode process"
        if link.direct and self._compatibility.encrypted:
            return "encrypted payloads cannot be copied on a device (--encrypt-kv)"
        return self._compatibility.refusal(hello)

    def close(self) -> None:
        """Close the listening sockets; open connections continue."""
        for listener in self._listeners:
            listener.close()

    def _accepted(self, transport: str, wire: Wire) -> None:
        unproven = [link for link in list(self._links) if link.open and not link.genuine]
        link = DataLink(wire, transport, self._handler)
        self._links[link] = None
        if len(unproven) >= MAX_UNPROVEN:
            ((busiest_host, _),) = Counter(other.host for other in unproven).most_common(1)
            oldest = next(other for other in unproven if other.host == busiest_host)
            oldest.end("too many unproven connections")
            self._count("unproven_refused")
        link.accept()


log = logging.getLogger(__name__)

DIAL_S = 1.0  # for all transports together; then the attempt is lost and the router retries


def usable(transports: Sequence[KvTransport], chosen: bool) -> list[KvTransport]:
    """Return the transports that this process can use; log each of the others with the reason.
    Raises TransportRefused if the transport is configured by name (`chosen`) and cannot be used."""
    working = []
    for transport in transports:
        try:
            transport.check()
        except TransportRefused as err:
            if chosen:
                raise
            log.warning("transport %s is not used: %s", transport.name, err)
            continue
        working.append(transport)
    return working


def listen_all(
    transports: Sequence[KvTransport],
    chosen: bool,
    incarnation: bytes,
    accept: Callable[[str, Wire], None],
) -> dict[str, Listener]:
    """Open decode's listeners; return transport name -> listener of the transports that can listen.
    Raises OSError if an address cannot be bound, and TransportRefused if the transport is
    configured by name (`chosen`) and cannot listen."""
    opened: dict[str, Listener] = {}
    for transport in transports:
        try:
            opened[transport.name] = transport.listen(incarnation, partial(accept, transport.name))
        except (OSError, TransportRefused) as err:
            if chosen or isinstance(err, OSError):
                for listener in opened.values():
                    listener.close()
                raise
            log.warning("transport %s is not used: %s", transport.name, err)
    return opened


class Dialer:
    """Opens data connections from prefill to decode; `refusals` counts failed tries by
    transport."""

    def __init__(self, transports: Sequence[KvTransport], handler: DataLinkHandler) -> None:
        self._transports = transports
        self._handler = handler
        self.refusals: Counter[str] = Counter()

    def dial(self, target: Target, hello: Hello) -> DataLink:
        """Connect to a decode process by the first transport that works, within DIAL_S seconds.
        Raises TransportRefused with the reason of each transport if none works."""
        deadline = time.monotonic() + DIAL_S
        reasons = []
        for transport in self._transports:
            remaining_s = max(0.01, deadline - time.monotonic())
            try:
                wire = transport.dial(target, remaining_s)
                remaining_s = max(0.01, deadline - time.monotonic())
                named_hello = replace(hello, transport=transport.name)
                link = DataLink.dial(wire, transport.name, self._handler, named_hello, remaining_s)
            except TransportRefused as err:
                self.refusals[transport.name] += 1
                reasons.append(f"{transport.name}: {err}")
                log.info(
                    "transport %s cannot connect to %s, so the next one is tried, if any: %s",
                    transport.name,
                    _target_name(target),
                    err,
                )
                continue
            log.info("transport %s connected to %s", transport.name, _target_name(target))
            return link
        raise TransportRefused("; ".join(reasons))


def _target_name(target: Target) -> str:
    return f"decode {target.incarnation.hex()[:8]}"
