"""Where the time to a request's first token went, over all of its tries. Pure.

Decode's phases begin with its own Admit. What came before that (the queue here, tries that were
lost) is queueing. A try that only went on after the first token says nothing of it: then the phases
are those of the try that gave it, as far as they are known.
"""

from pdserve.protos import common_pb2 as pb


class FirstToken:
    """Clock readings of one request."""

    def __init__(self, arrived: float) -> None:
        self._arrived = arrived
        self._attempt = b""  # that gave the first token
        self._began = 0.0  # its Admit
        self._came = 0.0

    def came(self, attempt: bytes, began: float, now: float) -> None:
        """Tokens of an attempt have come; only the first ones count."""
        if not self._attempt:
            self._attempt, self._began, self._came = attempt, began, now

    def complete(self, phases: pb.Phases, attempt: bytes) -> None:
        """Make the phases of the attempt that finished those of the request: their sum is the time
        to its first token. Those of an attempt that another router began are left as they are."""
        if not self._attempt:
            return
        if self._attempt != attempt:
            phases.CopyFrom(pb.Phases(prefill_s=self._came - self._began))
        phases.queue_s += self._began - self._arrived
