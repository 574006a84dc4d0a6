"""Size of the small pdserve, the faults that may occur, and the runs that cover them.

All faults, several at once, on two requests do not fit a search in Python, so the space is
factored into runs, each of them exhaustive. A single request meets every pair of faults at every
two moments. Two requests, which compete for decode's three blocks, meet every single fault at
every moment, and pairs of the small ones with prompts that share a block or are equal; where the
space is large the second request is tried only once. The runs cover every event, every pair of
events on one request, and every event on one request in every state of the other; they do not
cover two of the larger faults on two requests at once, or three on one.
"""

from dataclasses import dataclass

FAULTS = (
    "cancel",  # the client leaves
    "deadline",  # the request's time is up, for all at once, seen at each one's next look
    "crash decode",
    "crash prefill",
    "freeze decode",  # until it thaws, at any later moment
    "freeze prefill",
    "slow prefill",  # decode has had a block, and waits too long for the next
    "cut",  # a data connection breaks; each end notices at a separate moment
    "lose session",  # router - decode
    "lose prefill session",  # router - prefill
    "duplicate",  # a frame in flight arrives twice
    "torn",  # a frame in flight differs from what was signed
    "refuse dial",
    "refuse claim",  # the engine refuses to reserve, whatever its blocks
    "evict",  # a cached block loses its content, or a parked request its blocks
)


@dataclass(frozen=True)
class Config:
    """One run: exhaustive within these bounds."""

    name: str
    prompts: tuple[tuple[int, ...], ...]  # one request each; four tokens, so two blocks of two
    faults: tuple[str, ...] = ()  # that may occur, each once ...
    at_once: int = 0  # ... and at most this many of them in one path
    attempts: int = 2  # per request, at most
    once: bool = False  # the last request is not retried: its first attempt is its only one
    blocks: int = 3  # at decode
    prefills: int = 2
    prefill_blocks: int = 2  # of each

    @property
    def allowance(self) -> tuple[int, ...]:
        """Return how often each of FAULTS may occur."""
        return tuple(int(f in self.faults) for f in FAULTS)

    def tries(self, request: int) -> int:
        """Return the attempts of a request before the router gives it up."""
        return 1 if self.once and request == len(self.prompts) - 1 else self.attempts


A, B = (1, 2, 3, 4), (5, 6, 7, 8)
SHARED = (1, 2, 9, 9)  # its first block is A's

# Faults with few states: they end an attempt or touch a frame, and make no process unreachable.
SMALL = ("cancel", "slow prefill", "duplicate", "torn", "refuse dial", "refuse claim", "evict")

IN_TEST = (
    Config("one request, single faults", (A,), FAULTS, 1),
    Config("one request, pairs of the small faults", (A,), SMALL, 2),
    Config("one request, lost session and eviction", (A,), ("lose session", "evict"), 2),
    Config("two requests, a shared block", (A, SHARED), SMALL, 1),
    Config("two equal requests", (A, A), SMALL, 1),
)
WHOLE = (
    Config("one request, pairs of all faults", (A,), FAULTS, 2),
    Config("two requests, the small faults", (A, B), SMALL, 1),
    *(Config(f"two requests, {f}", (A, B), (f,), 1, once=True) for f in FAULTS if f not in SMALL),
    Config("two requests with a shared block, pairs", (A, SHARED), SMALL, 2, once=True),
    Config("two equal requests, pairs", (A, A), SMALL, 2, once=True),
)
