"""Rules for which workers may continue a request from the KV and tokens of another worker, with
counters of the exceptions.

A request that has generated tokens is bound to the KV identity of the worker that generated them.
It resumes on a worker with the same identity or, if none remains, on one whose differences the
operator's settings allow (Mixing).
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from pdserve.engine.kv import (
    NO_MIXING,
    Difference,
    KvIdentity,
    Mixing,
    differences,
    refusal,
    spec_difference,
)
from pdserve.services.router.fleet.worker import Worker, WorkerKind

HANDOFF_SIDES = ("at decode", "at prefill")
RESUME_SIDES = ("on the earlier worker", "on the new worker")

log = logging.getLogger(__name__)

COMPATIBLE_WORKER_WAIT_S = 30.0  # a worker that crashed may be starting again
MAX_LOGGED = 4096  # pairs whose refusal has been logged


def mismatch(prefill: WorkerKind, decode: WorkerKind, mixing: Mixing) -> Difference | None:
    """Return why a decode worker of kind `decode` cannot use the KV of a prefill worker of kind
    `prefill`, or None if it can."""
    if prefill.wire_version != decode.wire_version:
        text = f"wire version {decode.wire_version} at decode, {prefill.wire_version} at prefill"
        return Difference("wire version", text)
    decode_transports, prefill_transports = decode.transports, prefill.transports
    if not decode_transports or (
        prefill_transports is not decode_transports
        and set(prefill_transports).isdisjoint(decode_transports)
    ):
        decode_text, prefill_text = (
            " ".join(transports) or "none" for transports in (decode_transports, prefill_transports)
        )
        text = f"transports {decode_text} at decode, {prefill_text} at prefill"
        return Difference("transport", text)
    if prefill.encrypts != decode.encrypts:
        decode_text, prefill_text = ("on" if k.encrypts else "off" for k in (decode, prefill))
        text = f"KV encryption {decode_text} at decode, {prefill_text} at prefill"
        return Difference("encryption", text)
    identity_difference = refusal(decode.identity, prefill.identity, mixing, HANDOFF_SIDES)
    same_layout = decode.layout is prefill.layout or decode.layout == prefill.layout
    if identity_difference is None and not same_layout:
        return Difference("layout", spec_difference(decode.layout, prefill.layout, HANDOFF_SIDES))
    return identity_difference


class KvCompatibility:
    """Decides which workers may continue a request that another worker began. Counts excluded pairs
    of workers and inexact continuations."""

    def __init__(self, mixing: Mixing) -> None:
        self.incompatible: Counter[str] = Counter()  # pairs left out of a decision, by difference
        self.inexact: Counter[str] = Counter()  # "resume", "hand-off"
        self._mixing = mixing
        self._logged: set[tuple[bytes, bytes]] = set()
        self._withdrawn: set[str] = set()  # weights whose last worker drained
        self._expected: dict[str, float] = {}  # until when a worker with these weights may return

    def able(self, origin: KvIdentity | None, workers: Sequence[Worker]) -> Sequence[Worker]:
        """Return the workers that may continue a request whose tokens were generated under the KV
        identity `origin` (None: it has no tokens yet, so all may). These are the workers of the
        same identity. If none of them will keep accepting work, workers whose results may differ
        are included."""
        if origin is None:
            return workers
        admitted = [w for w in workers if refusal(origin, w.identity, self._mixing) is None]
        exact = [w for w in admitted if refusal(origin, w.identity, NO_MIXING) is None]
        staying = [w for w in exact if w.stays and not w.frozen]
        return exact if staying else admitted

    def withdrawn(self, origin: KvIdentity | None, now: float) -> bool:
        """Return whether all workers with the weights of `origin` were shut down and none is
        expected back. A worker is expected for COMPATIBLE_WORKER_WAIT_S after one with these
        weights crashed, or after the last worker of the model left."""
        if origin is None or _pool(origin) not in self._withdrawn:
            return False
        return now >= self._expected.get(_pool(origin), now)

    def joined(self, worker: Worker) -> None:
        """Record that a worker registered, so that its weights count as available again."""
        self._withdrawn.discard(_pool(worker.identity))

    def left(self, worker: Worker, others: Iterable[Worker], now: float) -> None:
        """Record that a worker was forgotten. `others`: the decode workers of its model that are
        still registered."""
        pool = _pool(worker.identity)
        pools = {_pool(other.identity) for other in others}
        if not worker.stays and pool not in pools:
            self._withdrawn.add(pool)
        if worker.stays or not pools:
            self._expected[pool] = now + COMPATIBLE_WORKER_WAIT_S

    def count_left_out(self, decode: bytes, refused: Iterable[tuple[bytes, Difference]]) -> None:
        """Count the prefill workers that a placement excluded because the chosen decode worker
        cannot use their KV, and log each pair of workers once. Workers are given by incarnation."""
        for prefill, difference in refused:
            self.incompatible[difference.what] += 1
            pair = (prefill, decode)
            if pair not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(pair)
                log.warning(
                    "decode worker %s cannot use KV of prefill worker %s; no request gets both: %s",
                    decode.hex()[:8],
                    prefill.hex()[:8],
                    difference.text,
                )

    def count_resume(self, request: str, origin: KvIdentity | None, identity: KvIdentity) -> bool:
        """Count and log a request that continues on a worker with another KV identity than
        `origin`, that of its earlier tokens. Returns whether the identities differ, so that the
        response is inexact."""
        if origin is None or origin.digest == identity.digest:
            return False
        self.inexact["resume"] += 1
        log.warning(
            "the request resumed on a worker with another KV identity, so its response may differ "
            "from an undisturbed one; differences: %s",
            "; ".join(d.text for d in differences(origin, identity, RESUME_SIDES)),
            extra={"request": request},
        )
        return True

    def count_handoff(self, prefill: KvIdentity, decode: KvIdentity) -> None:
        """Count a KV hand-off as inexact if the prefill and the decode worker have different KV
        identities."""
        self.inexact["hand-off"] += prefill.digest != decode.digest


def _pool(identity: KvIdentity) -> str:
    """Return a key for the weights of a KV identity, equal for all workers with the same
    weights."""
    return identity.weights or identity.digest.hex()
