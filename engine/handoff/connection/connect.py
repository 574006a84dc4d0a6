"""Opens data connections: prefill dials, decode listens.

Prefill uses the first transport that works, or the one that is configured by name. Every refusal is
logged with its reason and counted; no transport is replaced silently.

At decode a connection is unproven until a message under a ticket has shown that its peer knows the
ticket. Only MAX_UNPROVEN unproven connections may be open, so a peer that merely reaches the port
cannot exhaust threads and memory. Beyond that, the address with the most unproven connections loses
its oldest one: a prefill process proves itself in milliseconds, so a flood does not shut it out.
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
    """The listeners of one decode process.

    `links` belongs to the Receiver: each accepted connection is added to it.
    `count("unproven_refused")` is called for each unproven connection that is closed, on the thread
    of a listener.
    """

    def __init__(
        self,
        boot: bytes,
        compatibility: HandoffCompatibility,
        handler: DataLinkHandler,
        links: dict[DataLink, None],
        count: Callable[[str], None],
    ) -> None:
        self.refusals: Counter[str] = Counter()  # transports that cannot listen here
        self._boot = boot
        self._compatibility = compatibility
        self._handler = handler
        self._links = links
        self._count = count
        self._listeners: list[Listener] = []

    def open(self, transports: Sequence[KvTransport], chosen: bool) -> dict[str, str]:
        """Open the listeners; return transport name -> address.

        A transport that is configured by name (`chosen`) must work; otherwise one that does not
        work is left out. Raises TransportRefused, OSError.
        """
        opened = listen_all(transports, chosen, self._boot, self._accepted)
        self.refusals.update(t.name for t in transports if t.name not in opened)
        self._listeners += opened.values()
        return {name: listener.address for name, listener in opened.items()}

    def refusal(self, link: DataLink, hello: messages.Hello) -> str:
        """Return why a process that has introduced itself is refused; empty if it is accepted."""
        if hello.decode_boot != self._boot:
            return "the ticket names another decode process"
        if link.direct and self._compatibility.encrypted:
            return "encrypted payloads cannot be copied on a device (--encrypt-kv)"
        return self._compatibility.refusal(hello)

    def close(self) -> None:
        """Accept no more connections."""
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
    """Return the transports that can work in this process. Raises TransportRefused if one that is
    configured by name (`chosen`) cannot."""
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
    boot: bytes,
    accept: Callable[[str, Wire], None],
) -> dict[str, Listener]:
    """decode: open the listeners of the transports that can listen here, by name. Raises OSError,
    and TransportRefused if a transport that is configured by name (`chosen`) cannot listen."""
    opened: dict[str, Listener] = {}
    for transport in transports:
        try:
            opened[transport.name] = transport.listen(boot, partial(accept, transport.name))
        except (OSError, TransportRefused) as err:
            if chosen or isinstance(err, OSError):
                for listener in opened.values():
                    listener.close()
                raise
            log.warning("transport %s is not used: %s", transport.name, err)
    return opened


class Dialer:
    """Opens connections from prefill; `refusals` counts refused tries by transport."""

    def __init__(self, transports: Sequence[KvTransport], handler: DataLinkHandler) -> None:
        self._transports = transports
        self._handler = handler
        self.refusals: Counter[str] = Counter()

    def dial(self, target: Target, hello: Hello) -> DataLink:
        """Connect; blocks for at most DIAL_S. Raises TransportRefused with every reason."""
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
                    "transport %s to %s was refused: %s", transport.name, _target_name(target), err
                )
                continue
            log.info("transport %s connected to %s", transport.name, _target_name(target))
            return link
        raise TransportRefused("; ".join(reasons))


def _target_name(target: Target) -> str:
    return f"decode {target.boot.hex()[:8]}"
