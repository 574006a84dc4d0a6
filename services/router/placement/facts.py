"""What the placement policy knows of each worker about one prompt."""

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from pdserve.engine.kv import Mixing, cache_seed, chain_hashes
from pdserve.services.router.fleet import PrefixIndex, Worker, WorkerFacts, WorkerKind, mismatch
from pdserve.services.router.placement.policy import PromptFacts, pick_decode
from pdserve.services.router.placement.promises import PromisedChains


class _KnownBlocks(NamedTuple):
    """Where the prompt's blocks are, for workers that hash them alike."""

    chain: list[bytes]
    # Cached and promised tokens, by boot id of each worker that has any.
    tokens: dict[bytes, tuple[int, int]]


class FactsOfWorkers:
    """Facts of workers about one prompt, which is hashed and looked up once per kind of worker."""

    def __init__(
        self,
        ids: Sequence[int],
        cache_salt: bytes,
        verified: Mapping[bytes, int],
        index: PrefixIndex,
        promised: PromisedChains,
        now: float,
    ) -> None:
        self._ids = ids[:-1]  # the last one always runs as a decode row, so it is never a hit
        self._salt = cache_salt
        self._verified = verified  # tokens by boot id; their prefix events may not have arrived
        self._index = index
        self._promised = promised
        self._now = now
        self._known: dict[tuple[bytes, int], _KnownBlocks] = {}  # by digest and block size

    def of(self, worker: Worker) -> WorkerFacts:
        """Return what the policy knows of this worker about this prompt."""
        (facts,) = self.of_all([worker])
        return facts

    def of_all(self, workers: Iterable[Worker]) -> list[WorkerFacts]:
        """Return the facts of each worker, in their order. A worker that has nothing of the prompt
        yields the facts object that it keeps."""
        all_facts = []
        kind: WorkerKind | None = None
        for worker in workers:
            if worker.kind is not kind:
                kind = worker.kind
                tokens = self._of_kind(kind).tokens
            if worker.unreported:
                worker.forget_old_commands(self._now)
            facts = worker.facts
            if worker.boot in tokens:
                facts = facts.of_prompt(*tokens[worker.boot])
            all_facts.append(facts)
        return all_facts

    def chain(self, worker: Worker) -> list[bytes]:
        """Return the chain hashes of the prompt's full blocks, as that worker computes them."""
        return self._of_kind(worker.kind).chain

    def _of_kind(self, kind: WorkerKind) -> _KnownBlocks:
        digest, size = kind.identity.digest, kind.layout.block_size
        blocks = self._known.get((digest, size))
        if blocks is None:
            chain = chain_hashes(self._ids, size, cache_seed(digest, self._salt)) if size else []
            blocks = self._known[digest, size] = _KnownBlocks(chain, self._tokens(chain, size))
        return blocks

    def _tokens(self, chain: list[bytes], size: int) -> dict[bytes, tuple[int, int]]:
        """Return cached and promised tokens, by boot id of each worker that has or verified any of
        these blocks."""
        cached, promised = self._index.num_cached(chain), self._promised.num_promised(chain)
        result = {boot: (num * size, promised.get(boot, 0) * size) for boot, num in cached.items()}
        for boot, num in promised.items():
            result.setdefault(boot, (0, num * size))
        for boot, tokens in self._verified.items():
            previous = result.get(boot, (0, 0))
            result[boot] = max(previous[0], tokens), previous[1]
        return result


def destination(
    ids: Sequence[int],
    source: WorkerFacts,
    workers: Iterable[WorkerFacts],
    mixing: Mixing,
    rng: Random,
) -> bytes | None:
    """Return the boot id of the cheapest other decode worker that has room for a running request's
    KV and can take it from its worker `source`, or None. `ids`: as in FactsOfWorkers."""
    candidates = [
        other
        for other in workers
        if other.boot != source.boot
        and other.free_tokens >= len(ids)
        and mismatch(source.kind, other.kind, mixing) is None
    ]
    index = pick_decode(PromptFacts(len(ids) - 1), candidates, rng)
    return None if index is None else candidates[index].boot
