"""Facts about each worker and one prompt for the placement policy: the prompt's KV that the worker
has cached, and KV that is promised there. Pure; time is an argument.

From the Admit of an attempt on, the KV of its prompt is at the decode worker or on its way, but the
worker's prefix events report it only later; meanwhile the router counts this KV as promised.
Promises only decide which worker the router tries first: each worker decides by what it has.

When an endpoint picker has been given a worker for a prompt, the request arrives a moment later
from a gateway at that worker. Until then, for at most PICKED_S, the pick counts as a request at the
worker, which spreads a burst, and as a promise of the prompt's KV, which keeps prompts with the
same beginning together.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

from pdserve.engine.kv import Mixing, cache_seed, chain_hashes
from pdserve.services.router.fleet import PrefixIndex, Worker, WorkerFacts, WorkerKind, mismatch
from pdserve.services.router.placement.policy import PromptFacts, pick_decode

PICKED_S = 1.0
MAX_PICKS = 4096  # open at once; the oldest makes room for a new one
PromptKey = tuple[str, bytes, int]


class PromisedChains:
    """Prompt blocks that decode workers have or will have soon: the chain hashes of the prompts of
    live attempts, counted by worker."""

    def __init__(self) -> None:
        self._counts: dict[bytes, Counter[bytes]] = {}  # by incarnation of the worker
        self._incarnations: dict[bytes, set[bytes]] = {}  # of workers, by the first link of a chain
        self._attempts: dict[bytes, tuple[bytes, Sequence[bytes]]] = {}

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._attempts)

    def add(self, attempt: bytes, incarnation: bytes, chain: Sequence[bytes]) -> None:
        """Add the prompt of an attempt that began at a decode worker. `chain`: chain hashes of the
        prompt's full blocks."""
        self._attempts[attempt] = incarnation, chain
        self._counts.setdefault(incarnation, Counter()).update(chain)
        if chain:
            self._incarnations.setdefault(chain[0], set()).add(incarnation)

    def drop(self, attempt: bytes) -> None:
        """Remove the prompt of an attempt that is over; no effect if the attempt is unknown."""
        incarnation, chain = self._attempts.pop(attempt, (b"", ()))
        counts = self._counts.get(incarnation)
        if counts is None:
            return
        for link in chain:
            counts[link] -= 1
            if not counts[link]:
                del counts[link]
        if chain and chain[0] not in counts:
            self._incarnations[chain[0]].discard(incarnation)
            if not self._incarnations[chain[0]]:
                del self._incarnations[chain[0]]
        if not counts:
            del self._counts[incarnation]

    def num_promised(self, chain: Sequence[bytes]) -> dict[bytes, int]:
        """Return how many of a prompt's first blocks are promised at each worker, by the worker's
        incarnation; workers without any are absent. `chain`: chain hashes of the prompt's
        blocks."""
        num_blocks = {}
        for incarnation in self._incarnations.get(chain[0], ()) if chain else ():
            counts = self._counts[incarnation]
            # A link is promised with all links before it, so the promised ones come first.
            num_blocks[incarnation] = bisect_left(chain, True, key=lambda link: link not in counts)
        return num_blocks


def prompt_key(model: str, cache_salt: bytes, ids: Sequence[int]) -> PromptKey:
    """Return a key for a prompt that is equal for equal prompts of the same model and tenant."""
    return model, cache_salt, hash(tuple(ids))


@dataclass(frozen=True, slots=True)
class PickedPrompt:
    """A prompt for which an endpoint picker was given a worker, and whose request has not arrived
    yet."""

    number: bytes
    key: PromptKey
    incarnation: bytes
    num_tokens: int  # tokens that the worker will compute
    picked_at: float


class PickedPrompts:
    """All prompts for which endpoint pickers were given a worker, and whose requests have not
    arrived yet. Each is called a pick."""

    def __init__(self, promised: PromisedChains) -> None:
        self._promised = promised
        self._open: dict[bytes, PickedPrompt] = {}  # by number, oldest first
        self._of_prompts: dict[PromptKey, deque[PickedPrompt]] = {}
        self._requests: Counter[bytes] = Counter()  # by incarnation
        self._tokens: Counter[bytes] = Counter()
        self._num = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(
        self,
        key: PromptKey,
        incarnation: bytes,
        chain: Sequence[bytes],
        num_tokens: int,
        now: float,
    ) -> None:
        """Add a pick: a prompt and the incarnation of the worker given to the endpoint picker.
        `chain`: chain hashes of the prompt's full blocks at the worker; `num_tokens`: tokens that
        the worker will compute."""
        self.forget_old(now)
        self._num += 1
        pick = PickedPrompt(b"pick %d" % self._num, key, incarnation, num_tokens, now)
        self._open[pick.number] = pick
        self._of_prompts.setdefault(key, deque()).append(pick)
        self._requests[incarnation] += 1
        self._tokens[incarnation] += num_tokens
        self._promised.add(pick.number, incarnation, chain)

    def take(self, key: PromptKey, now: float) -> bytes | None:
        """Remove the oldest pick of a prompt, whose request has arrived. Returns the incarnation of
        the picked worker, or None if the prompt has no pick."""
        self.forget_old(now)
        picks = self._of_prompts.get(key)
        if not picks:
            return None
        pick = picks[0]
        self._forget(pick)
        return pick.incarnation

    def counted(self, facts: WorkerFacts, now: float) -> WorkerFacts:
        """Return a worker's facts with its picks added to the number of requests and of waiting
        tokens."""
        self.forget_old(now)
        num = self._requests.get(facts.incarnation, 0)
        if not num:
            return facts
        waiting = facts.waiting_tokens + self._tokens[facts.incarnation]
        return replace(facts, requests=facts.requests + num, waiting_tokens=waiting)

    def forget_old(self, now: float) -> None:
        """Remove the picks whose request has not arrived within PICKED_S, and the oldest ones while
        there are MAX_PICKS or more."""
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
        self._requests[pick.incarnation] -= 1
        self._tokens[pick.incarnation] -= pick.num_tokens
        if not self._requests[pick.incarnation]:
            del self._requests[pick.incarnation], self._tokens[pick.incarnation]
        self._promised.drop(pick.number)


class _KnownBlocks(NamedTuple):
    """The chain hashes of a prompt's blocks, and how much of the prompt each worker has, for all
    workers that compute the same hashes."""

    chain: list[bytes]
    # Cached and promised tokens, by incarnation of each worker that has any.
    tokens: dict[bytes, tuple[int, int]]


class FactsOfWorkers:
    """Facts about workers for one prompt, as the placement policy needs them. The prompt is hashed
    and looked up only once for all workers with the same KV identity and block size."""

    def __init__(
        self,
        ids: Sequence[int],
        cache_salt: bytes,
        verified: Mapping[bytes, int],
        index: PrefixIndex,
        promised: PromisedChains,
        now: float,
        uses_cache: bool = True,
    ) -> None:
        """`uses_cache`: whether workers skip the prompt's cached tokens; else none count as cached
        or promised."""
        self._ids = ids[:-1]  # the last one always runs as a decode row, so it is never a hit
        self._salt = cache_salt
        self._verified = verified  # tokens by incarnation; their prefix events may not have arrived
        self._index = index
        self._promised = promised
        self._now = now
        self._uses_cache = uses_cache
        self._known: dict[tuple[bytes, int], _KnownBlocks] = {}  # by digest and block size

    def of(self, worker: Worker) -> WorkerFacts:
        """Return the facts about one worker for the prompt."""
        (facts,) = self.of_all([worker])
        return facts

    def of_all(self, workers: Iterable[Worker]) -> list[WorkerFacts]:
        """Return the facts about each worker for the prompt, in the order of `workers`. The facts
        of a worker that has no block of the prompt are the worker's own object, not a copy."""
        all_facts = []
        kind: WorkerKind | None = None
        for worker in workers:
            if worker.kind is not kind:
                kind = worker.kind
                tokens = self._of_kind(kind).tokens if self._uses_cache else {}
            if worker.unreported:
                worker.forget_old_commands(self._now)
            facts = worker.facts
            if worker.incarnation in tokens:
                facts = facts.of_prompt(*tokens[worker.incarnation])
            all_facts.append(facts)
        return all_facts

    def chain(self, worker: Worker) -> list[bytes]:
        """Return the chain hashes of the prompt's full blocks, as the given worker computes
        them."""
        return self._of_kind(worker.kind).chain

    def _of_kind(self, kind: WorkerKind) -> _KnownBlocks:
        digest, size = kind.identity.digest, kind.layout.block_size
        blocks = self._known.get((digest, size))
        if blocks is None:
            chain = chain_hashes(self._ids, size, cache_seed(digest, self._salt)) if size else []
            blocks = self._known[digest, size] = _KnownBlocks(chain, self._tokens(chain, size))
        return blocks

    def _tokens(self, chain: list[bytes], size: int) -> dict[bytes, tuple[int, int]]:
        """Return how many of the prompt's tokens are cached and how many are promised, by
        incarnation of each worker that has any or has verified any. `size`: tokens in a block."""
        cached, promised = self._index.num_cached(chain), self._promised.num_promised(chain)
        result = {
            incarnation: (num * size, promised.get(incarnation, 0) * size)
            for incarnation, num in cached.items()
        }
        for incarnation, num in promised.items():
            result.setdefault(incarnation, (0, num * size))
        for incarnation, tokens in self._verified.items():
            previous = result.get(incarnation, (0, 0))
            result[incarnation] = max(previous[0], tokens), previous[1]
        return result


def destination(
    ids: Sequence[int],
    source: WorkerFacts,
    workers: Iterable[WorkerFacts],
    mixing: Mixing,
    rng: Random,
) -> bytes | None:
    """Return the decode worker (its incarnation) to which a running request migrates best: the
    cheapest other one that has room for the request's KV and can use the KV of `source`, its
    present worker; None if no worker qualifies. `ids`: prompt and generated ids."""
    candidates = [
        other
        for other in workers
        if other.incarnation != source.incarnation
        and other.free_tokens >= len(ids)
        and mismatch(source.kind, other.kind, mixing) is None
    ]
    index = pick_decode(PromptFacts(len(ids) - 1), candidates, rng)
    return None if index is None else candidates[index].incarnation
