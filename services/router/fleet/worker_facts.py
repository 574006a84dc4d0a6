"""What the placement policy sees of one worker."""

from dataclasses import dataclass

from pdserve.services.router.fleet.worker_kind import WorkerKind


@dataclass(slots=True)
class WorkerFacts:
    """A value, never changed. Not frozen, because a frozen one takes five times as long to make,
    for each load report."""

    boot: bytes
    kind: WorkerKind
    requests: int = 0  # running, waiting, and sent by this router but not yet reported
    waiting_tokens: int = 0  # prompt tokens not computed yet, also those sent but not reported
    free_tokens: int = 0  # decode: room for KV, less what is promised to hand-offs
    # Tokens of one prompt; 0 in the facts that a Worker keeps, which concern no prompt.
    cached_tokens: int = 0
    promised_tokens: int = 0  # from its start, cached or in transfer for other requests

    def of_prompt(self, cached_tokens: int, promised_tokens: int) -> "WorkerFacts":
        """Return the same worker's facts for a prompt of which it has so many tokens."""
        # By position: names take twice as long, and `replace` six times.
        return WorkerFacts(
            self.boot,
            self.kind,
            self.requests,
            self.waiting_tokens,
            self.free_tokens,
            cached_tokens,
            promised_tokens,
        )
