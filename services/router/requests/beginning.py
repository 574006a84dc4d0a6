"""What a request's Finished says of how it began, whatever became of its first attempt; pure."""

from dataclasses import dataclass

from pdserve.protos import common_pb2 as pb
from pdserve.services.router.requests.times import FirstToken


@dataclass(slots=True)
class Beginning:
    """Of one request."""

    token: FirstToken
    hit: int | None = None  # tokens that were cached before decode verified the first block
    expected: int | None = None  # likewise, as the router knew it at the first try
    first: pb.Finished | None = None  # what the attempt said that it moved from

    def moved(self, so_far: pb.Finished, num_attempts: int, attempt: bytes) -> None:
        """It leaves `attempt`, whose beginning is `so_far`."""
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
