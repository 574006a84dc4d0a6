"""KV that decode workers will have: chains of running attempts, and open picks of endpoint pickers.
Pure; time is an argument.

From its Admit on, the KV of an attempt's prompt is at the worker or on its way, but prefix events
report it only later. Workers decide by their own knowledge: this only says which to try first.

A picked request arrives a moment later from a gateway at that worker. Until then, for at most
PICKED_S, the pick counts as a request at the worker, which spreads a burst, and as a promise of the
prompt's KV, which keeps prompts with the same beginning together. Then the request replaces the
pick and is placed on the picked worker.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pdserve.services.router.fleet import WorkerFacts

PICKED_S = 1.0
MAX_PICKS = 4096  # open at once; the oldest makes room for a new one
PromptKey = tuple[str, bytes, int]


class PromisedChains:
    """Chain hashes by worker, counted over the live attempts."""

    def __init__(self) -> None:
        self._counts: dict[bytes, Counter[bytes]] = {}  # by boot id of the worker
        self._boots: dict[bytes, set[bytes]] = {}  # of workers, by the first link of a chain
        self._attempts: dict[bytes, tuple[bytes, Sequence[bytes]]] = {}

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._attempts)

    def add(self, attempt: bytes, boot: bytes, chain: Sequence[bytes]) -> None:
        """Add an attempt that began at a worker. `chain`: hashes of its prompt's full blocks."""
        self._attempts[attempt] = boot, chain
        self._counts.setdefault(boot, Counter()).update(chain)
        if chain:
            self._boots.setdefault(chain[0], set()).add(boot)

    def drop(self, attempt: bytes) -> None:
        """Drop an attempt that is over; no effect if it is not present."""
        boot, chain = self._attempts.pop(attempt, (b"", ()))
        counts = self._counts.get(boot)
        if counts is None:
            return
        for link in chain:
            counts[link] -= 1
            if not counts[link]:
                del counts[link]
        if chain and chain[0] not in counts:
            self._boots[chain[0]].discard(boot)
            if not self._boots[chain[0]]:
                del self._boots[chain[0]]
        if not counts:
            del self._counts[boot]

    def num_promised(self, chain: Sequence[bytes]) -> dict[bytes, int]:
        """Return the number of leading blocks of a chain that are promised, by boot id of each
        worker with any."""
        num_blocks = {}
        for boot in self._boots.get(chain[0], ()) if chain else ():
            counts = self._counts[boot]
            # A link is promised with all links before it, so the promised ones come first.
            num_blocks[boot] = bisect_left(chain, True, key=lambda link: link not in counts)
        return num_blocks


def prompt_key(model: str, cache_salt: bytes, ids: Sequence[int]) -> PromptKey:
    """Return a key that is equal for equal prompts of one tenant."""
    return model, cache_salt, hash(tuple(ids))


@dataclass(frozen=True, slots=True)
class PickedPrompt:
    """A prompt with a picked worker whose request has not arrived yet."""

    number: bytes
    key: PromptKey
    boot: bytes
    num_tokens: int  # tokens that the worker will compute
    picked_at: float


class PickedPrompts:
    """The open picks of one router."""

    def __init__(self, promised: PromisedChains) -> None:
        self._promised = promised
        self._open: dict[bytes, PickedPrompt] = {}  # by number, oldest first
        self._of_prompts: dict[PromptKey, deque[PickedPrompt]] = {}
        self._requests: Counter[bytes] = Counter()  # by boot
        self._tokens: Counter[bytes] = Counter()
        self._num = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(
        self, key: PromptKey, boot: bytes, chain: Sequence[bytes], num_tokens: int, now: float
    ) -> None:
        """Add a pick of the worker `boot`. `chain`: hashes of the prompt's full blocks there."""
        self.forget_old(now)
        self._num += 1
        pick = PickedPrompt(b"pick %d" % self._num, key, boot, num_tokens, now)
        self._open[pick.number] = pick
        self._of_prompts.setdefault(key, deque()).append(pick)
        self._requests[boot] += 1
        self._tokens[boot] += num_tokens
        self._promised.add(pick.number, boot, chain)

    def take(self, key: PromptKey, now: float) -> bytes | None:
        """Return the boot id of the picked worker for a prompt, once per pick, or None."""
        self.forget_old(now)
        picks = self._of_prompts.get(key)
        if not picks:
            return None
        pick = picks[0]
        self._forget(pick)
        return pick.boot

    def counted(self, facts: WorkerFacts, now: float) -> WorkerFacts:
        """Return the facts of a worker including its picked requests."""
        self.forget_old(now)
        num = self._requests.get(facts.boot, 0)
        if not num:
            return facts
        waiting = facts.waiting_tokens + self._tokens[facts.boot]
        return replace(facts, requests=facts.requests + num, waiting_tokens=waiting)

    def forget_old(self, now: float) -> None:
        """Forget picks whose request has not arrived in time, and the oldest if there are too
        many."""
        while self._open:
            oldest = next(iter(self._open.values()))
            if now - oldest.picked_at < PICKED_S and len(self._open) < MAX_PICKS:
                return
            self._forget(oldest)

    def _forget(self, pick: PickedPrompt) -> None:
        del self._open[pick.number]
        picks = self._of_prompts[pick.key]
        picks.remove(pick)
        if not picks:
            del self._of_prompts[pick.key]
        self._requests[pick.boot] -= 1
        self._tokens[pick.boot] -= pick.num_tokens
        if not self._requests[pick.boot]:
            del self._requests[pick.boot], self._tokens[pick.boot]
        self._promised.drop(pick.number)
