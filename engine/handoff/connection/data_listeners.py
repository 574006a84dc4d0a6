"""The listeners that prefill processes connect to at decode, and which connections are accepted.

A connection is unproven until a message under a ticket has shown that its peer knows the ticket.
Only MAX_UNPROVEN unproven connections may be open, so a peer that merely reaches the port cannot
exhaust threads and memory. Beyond that, the address with the most unproven connections loses its
oldest one: a prefill process proves itself in milliseconds, so a flood does not shut it out.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from pdserve.engine.handoff.connection.dial import listen_all
from pdserve.engine.handoff.connection.link import DataLink, DataLinkHandler
from pdserve.engine.handoff.protocol import HandoffCompatibility, messages
from pdserve.engine.transport import KvTransport, Listener, Wire

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
