"""Chooses the transport of a pair: the first that works, or the one that is configured by name.

Every refusal is logged with its reason and counted; no transport is replaced silently.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from pdserve.engine.handoff.connection.link import DataLink, DataLinkHandler
from pdserve.engine.handoff.protocol import Hello
from pdserve.engine.transport import KvTransport, Listener, Target, TransportRefused, Wire

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
