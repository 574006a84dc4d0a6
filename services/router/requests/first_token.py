"""How a request began, for its Finished, whatever became of its first attempt; pure.

The time to its first token is that of all its tries. Decode's phases begin with its own Admit; what
came before that (the queue here, tries that were lost) is queueing. The phases are those of the
attempt that gave the first token, as far as they are known; a later one has no say in them.
"""

from dataclasses import dataclass

from pdserve.protos import common_pb2 as pb


class FirstToken:
    """Clock readings of one request, until its first token."""

    def __init__(self, arrived: float) -> None:
        self._arrived = arrived
        self._attempt = b""  # that gave the first token
        self._began = 0.0  # its Admit
        self._came = 0.0

    def came(self, attempt: bytes, began: float, now: float) -> bool:
        """Tokens of an attempt have come; whether they are the first ones: only those count."""
        if self._attempt:
            return False
        self._attempt, self._began, self._came = attempt, began, now
        return True

    def complete(self, phases: pb.Phases, attempt: bytes) -> None:
        """Make the phases of the attempt that finished those of the request: their sum is the time
        to its first token. Those of an attempt that another router began are left as they are."""
        if not self._attempt:
            return
        if self._attempt != attempt:
            phases.CopyFrom(pb.Phases(prefill_s=self._came - self._began))
        phases.route_s = self._began - self._arrived
        phases.queue_s += phases.route_s


@dataclass(slots=True)
class Beginning:
    """What the router knows of a request's beginning."""

    token: FirstToken
    hit: int | None = None  # tokens that were cached before decode verified the first block
    expected: int | None = None  # likewise, as the router knew it at the first try
    first: pb.Finished | None = None  # what the attempt said that the request migrated from

    def moved(self, so_far: pb.Finished, num_attempts: int, attempt: bytes) -> None:
        """The request leaves `attempt`, whose beginning is `so_far`."""
        self.complete(so_far, num_attempts, attempt)
        self.first = so_far

    def complete(self, finished: pb.Finished, num_attempts: int, attempt: bytes) -> None:
        """Add what the worker of `attempt`, the last one, cannot know."""
        first = self.first
        if first is not None:
            finished.cached_tokens = first.cached_tokens
            finished.remote, finished.transport = first.remote, first.transport
            finished.phases.CopyFrom(first.phases)
            finished.inexact |= first.inexact
            return
        self.token.complete(finished.phases, attempt)
        known = self.expected if self.hit is None else self.hit
        if num_attempts > 1 and known is not None:
            # What an earlier try has left in a cache was computed for this request.
            finished.cached_tokens = min(finished.cached_tokens, known)
