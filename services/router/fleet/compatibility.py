"""Which workers may go on with KV and tokens of another; what was left out, what was inexact.

A request that has generated on a worker is bound to that worker's KV identity. It is resumed on the
same one, or on one that the operator's Mixing admits.
"""

import logging
from collections import Counter
from collections.abc import Iterable

from pdserve.engine.kv.identity import Difference, KvIdentity, Mixing, differences, refusal

log = logging.getLogger(__name__)

MAX_LOGGED = 4096  # pairs whose refusal has been logged


class KvCompatibility:
    """The rule, and its counters."""

    def __init__(self, mixing: Mixing) -> None:
        self.incompatible: Counter[str] = Counter()  # pairs left out of a decision, by difference
        self.inexact: Counter[str] = Counter()  # "resume", "hand-off"
        self._mixing = mixing
        self._logged: set[tuple[bytes, bytes]] = set()

    def may_continue(self, origin: KvIdentity | None, identity: KvIdentity) -> bool:
        """Whether a worker of `identity` may go on with what `origin` has computed; None: nobody
        has computed anything yet."""
        return origin is None or refusal(origin, identity, self._mixing) is None

    def count_left_out(self, decode: bytes, refused: Iterable[tuple[bytes, Difference]]) -> None:
        """Prefill workers, by boot id, cannot send to a decode worker."""
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

    def count_resume(self, request: str, origin: KvIdentity | None, identity: KvIdentity) -> bool:
        """A worker of `identity` has taken the request; whether it goes on inexactly."""
        if origin is None or origin.digest == identity.digest:
            return False
        self.inexact["resume"] += 1
        log.warning(
            "resumed on another KV identity: %s",
            "; ".join(d.text for d in differences(origin, identity)),
            extra={"request": request},
        )
        return True

    def count_handoff(self, prefill: KvIdentity, decode: KvIdentity) -> None:
        """KV that a prefill worker computed is in use."""
        self.inexact["hand-off"] += prefill.digest != decode.digest
