"""What placement knows of a worker; a value."""

from dataclasses import dataclass

from pdserve.services.router.fleet.worker_kind import WorkerKind


@dataclass(slots=True)
class WorkerFacts:
    """One worker that can take work now, as the policy sees it. Never changed, and not frozen only
    since that takes five times as long to make, for each load report."""

    boot: bytes
    kind: WorkerKind
    requests: int = 0  # running, waiting, and sent by this router but not yet reported
    waiting_tokens: int = 0  # prompt tokens not computed yet, with those sent but not reported
    free_tokens: int = 0  # decode: whose KV has room without anybody being preempted
    # Of one prompt; a Worker's own facts are of none.
    cached_tokens: int = 0
    promised_tokens: int = 0  # those, and what is on its way there for others


def with_blocks(facts: WorkerFacts, cached_tokens: int, promised_tokens: int) -> WorkerFacts:
    """The worker's facts of a prompt of which it has that much."""
    # As `replace` would, which takes eight times as long.
    return WorkerFacts(
        facts.boot,
        facts.kind,
        facts.requests,
        facts.waiting_tokens,
        facts.free_tokens,
        cached_tokens,
        promised_tokens,
    )
