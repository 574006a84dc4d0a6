"""Which transport a pair uses: the first that works, or the one asked for by name.

Every refusal is kept with its reason, logged and counted; nothing is replaced silently.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from pdserve.engine.handoff.connection.link import DataLink, DataLinkHandler
from pdserve.engine.handoff.protocol.messages import Hello
from pdserve.engine.transport.base import KvTransport, Listener, Target, TransportRefused, Wire

log = logging.getLogger(__name__)

DIAL_S = 1.0  # in all; later the attempt is lost and the router tries again


def usable(transports: Sequence[KvTransport], chosen: bool) -> list[KvTransport]:
    """Those that this process has what they need for. One that was asked for by name (`chosen`)
    must be: raises TransportRefused."""
    found = []
    for transport in transports:
        try:
            transport.check()
        except TransportRefused as err:
            if chosen:
                raise
            log.warning("transport %s is left out: %s", transport.name, err)
            continue
        found.append(transport)
    return found


def listen_all(
    transports: Sequence[KvTransport],
    chosen: bool,
    boot: bytes,
    accept: Callable[[str, Wire], None],
) -> dict[str, Listener]:
    """decode: by name the listeners of those that can listen here. One that was asked for by name
    (`chosen`) must: raises TransportRefused. Raises OSError."""
    opened: dict[str, Listener] = {}
    for transport in transports:
        try:
            opened[transport.name] = transport.listen(boot, partial(accept, transport.name))
        except (OSError, TransportRefused) as err:
            if chosen or isinstance(err, OSError):
                for listener in opened.values():
                    listener.close()
                raise
            log.warning("transport %s is left out: %s", transport.name, err)
    return opened


class Dialer:
    """Opens links from prefill. `refusals` counts (transport, reason without its address)."""

    def __init__(self, transports: Sequence[KvTransport], handler: DataLinkHandler) -> None:
        self._transports = transports
        self._handler = handler
        self.refusals: Counter[str] = Counter()

    def dial(self, target: Target, hello: Hello) -> DataLink:
        """Blocks for at most DIAL_S. Raises TransportRefused with every reason."""
        end = time.monotonic() + DIAL_S
        reasons = []
        for transport in self._transports:
            left = max(0.01, end - time.monotonic())
            try:
                wire = transport.dial(target, left)
                left = max(0.01, end - time.monotonic())
                named = replace(hello, transport=transport.name)
                link = DataLink.dial(wire, transport.name, self._handler, named, left)
            except TransportRefused as err:
                self.refusals[transport.name] += 1
                reasons.append(f"{transport.name}: {err}")
                log.info("transport %s to %s refused: %s", transport.name, _short(target), err)
                continue
            log.info("transport %s to %s", transport.name, _short(target))
            return link
        raise TransportRefused("; ".join(reasons))


def _short(target: Target) -> str:
    return f"decode {target.boot.hex()[:8]}"
