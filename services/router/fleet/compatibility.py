"""Which workers may go on with each other's KV and tokens; what was left out, what was inexact.

A request that has generated on a worker is bound to that worker's KV identity
(`RoutedRequest.origin`): it is resumed on the same, or on one that the operator's Mixing admits.
One whose kin have all gone is set aside, so that it holds up nobody behind it, until one comes or
STRANDED_S are over.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from pdserve.engine.kv.identity import KvIdentity, Mixing, differences, refusal
from pdserve.services.router.fleet.fleet import Worker
from pdserve.services.router.placement.policy import Refused
from pdserve.services.router.requests.effects import Attempt
from pdserve.services.router.requests.request import RoutedRequest

log = logging.getLogger(__name__)

STRANDED_S = 30.0  # a worker with the same weights may be starting again
MAX_LOGGED = 4096  # pairs whose refusal has been logged


class KvCompatibility:
    """The rule, its counters, and the flows that wait for kin."""

    def __init__(self, mixing: Mixing) -> None:
        self.incompatible: Counter[str] = Counter()  # pairs left out of a decision, by difference
        self.inexact: Counter[str] = Counter()  # "resume", "hand-off"
        self.stranded: dict[RoutedRequest, float] = {}  # since when
        self._mixing = mixing
        self._logged: set[tuple[bytes, bytes]] = set()

    def may_continue(self, flow: RoutedRequest, identity: KvIdentity) -> bool:
        """Whether a worker of that identity may go on with what the flow has."""
        return flow.origin is None or refusal(flow.origin, identity, self._mixing) is None

    def left_out(self, decode: bytes, refused: Iterable[Refused]) -> None:
        """Prefill workers that cannot send to that decode worker."""
        for prefill, difference in refused:
            self.incompatible[difference.what] += 1
            pair = (prefill, decode)
            if pair not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(pair)
                log.warning(
                    "decode %s is not paired with prefill %s: %s",
                    decode.hex()[:8],
                    prefill.hex()[:8],
                    difference.text,
                )

    def admitted(self, flow: RoutedRequest, attempt: Attempt) -> None:
        """A try runs on a decode worker."""
        identity = attempt.decode.identity
        if flow.origin is not None and flow.origin.digest != identity.digest:
            flow.inexact = True
            self.inexact["resume"] += 1
            log.warning(
                "resumed on another KV identity: %s",
                "; ".join(d.text for d in differences(flow.origin, identity)),
                extra={"request": flow.request},
            )

    def handed_off(self, attempt: Attempt) -> None:
        """KV that a prefill worker computed is in use."""
        if attempt.prefill is not None:
            other = attempt.prefill.identity.digest != attempt.decode.identity.digest
            self.inexact["hand-off"] += other

    def strand(self, flow: RoutedRequest, workers: Sequence[Worker], now: float) -> bool:
        """Whether none of its model's workers may go on with a flow: it is set aside then."""
        if not workers or any(self.may_continue(flow, w.identity) for w in workers):
            return False
        self.stranded[flow] = now
        log.warning("no worker has its weights any more", extra={"request": flow.request})
        return True

    def welcome(self, worker: Worker) -> list[RoutedRequest]:
        """The flows that a new decode worker may go on with; they are no longer set aside."""
        kin = [
            flow
            for flow in self.stranded
            if flow.model == worker.model and self.may_continue(flow, worker.identity)
        ]
        for flow in kin:
            del self.stranded[flow]
        return kin

    def overdue(self, now: float) -> list[RoutedRequest]:
        """Those that have waited long enough."""
        return [flow for flow, since in self.stranded.items() if now - since >= STRANDED_S]
