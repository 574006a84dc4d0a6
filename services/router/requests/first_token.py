"""Timing and cache facts about the beginning of a request, for its Finished; pure.

The time to the first token spans all attempts. Decode's phases begin with its Admit; the time
before it (the queue here, lost attempts) counts as queueing. The phases are those of the attempt
that gave the first token, as far as known; a later attempt does not change them.
"""

from dataclasses import dataclass

from pdserve.protos import common_pb2 as pb


class FirstToken:
    """Clock readings of one request up to its first token."""

    def __init__(self, arrived: float) -> None:
        self._arrived = arrived
        self._attempt = b""  # the one that gave the first token
        self._began = 0.0  # when its Admit was sent
        self._received = 0.0

    def record(self, attempt: bytes, began: float, now: float) -> bool:
        """Note that tokens of an attempt came. Returns whether they are the first; only those
        count."""
        if self._attempt:
            return False
        self._attempt, self._began, self._received = attempt, began, now
        return True

    def complete(self, phases: pb.Phases, attempt: bytes) -> None:
        """Turn the phases of the attempt that finished into those of the request, whose sum is the
        time to its first token. Phases of an attempt that another router began stay as they are."""
        if not self._attempt:
            return
        if self._attempt != attempt:
            phases.CopyFrom(pb.Phases(prefill_s=self._received - self._began))
        phases.route_s = self._began - self._arrived
        phases.queue_s += phases.route_s


@dataclass(slots=True)
class Beginning:
    """What the router knows of a request's beginning."""

    token: FirstToken
    hit: int | None = None  # tokens cached before decode verified the first block
    expected: int | None = None  # the same, as the router knew it at the first attempt
    first: pb.Finished | None = None  # report of the attempt that the request migrated from

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
        cached = self.expected if self.hit is None else self.hit
        if num_attempts > 1 and cached is not None:
            # Blocks that an earlier attempt left in a cache were computed for this request.
            finished.cached_tokens = min(finished.cached_tokens, cached)
