"""What the placement policy knows of each worker about one prompt."""

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from pdserve.engine.kv.block_hash import cache_seed, chain_hashes
from pdserve.engine.kv.identity import Mixing
from pdserve.services.router.fleet.fleet import Worker
from pdserve.services.router.fleet.prefix_index import PrefixIndex
from pdserve.services.router.fleet.worker_kind import WorkerKind, mismatch
from pdserve.services.router.placement.policy import PromptFacts, WorkerFacts, pick_decode
from pdserve.services.router.placement.promised_chains import PromisedChains


class _KnownBlocks(NamedTuple):
    """Where the prompt's blocks are, for workers that hash them alike."""

    chain: list[bytes]
    num_cached: dict[int, int]  # leading blocks, by the bit of the worker
    num_promised: dict[bytes, int]  # likewise, by its boot


class FactsOfWorkers:
    """The prompt is hashed and looked up at most once for each kind of worker."""

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
        self._verified = verified  # by boot: tokens whose prefix events may be on their way
        self._index = index
        self._promised = promised
        self._now = now
        self._known: dict[tuple[bytes, int], _KnownBlocks] = {}  # by what chains depend on

    def of(self, worker: Worker) -> WorkerFacts:
        """What the policy knows of this worker about this prompt."""
        (facts,) = self.of_all([worker])
        return facts

    def of_all(self, workers: Iterable[Worker]) -> list[WorkerFacts]:
        """The same of each, in their order. It is the longest part of a placement: what a kind has
        is looked up where another kind follows, and tables that are empty are not asked."""
        found, now, verified = [], self._now, self._verified
        kind: WorkerKind | None = None
        for worker in workers:
            if worker.kind is not kind:
                kind = worker.kind
                size, known = kind.layout.block_size, self._of_kind(kind)
                num_cached, num_promised = known.num_cached, known.num_promised
            boot = worker.boot
            requests, waiting_tokens = worker.expected(now)
            cached = num_cached.get(worker.prefixes.bit, 0) * size if num_cached else 0
            if verified:
                cached = max(cached, verified.get(boot, 0))
            promised = num_promised.get(boot, 0) * size if num_promised else 0
            # By position: names take twice as long.
            found.append(
                WorkerFacts(
                    boot, kind, requests, waiting_tokens, cached, promised, worker.free_tokens
                )
            )
        return found

    def chain(self, worker: Worker) -> list[bytes]:
        """Chain hashes of the prompt's full blocks, as that worker makes them."""
        return self._of_kind(worker.kind).chain

    def _of_kind(self, kind: WorkerKind) -> _KnownBlocks:
        digest, size = kind.identity.digest, kind.layout.block_size
        known = self._known.get((digest, size))
        if known is None:
            chain = chain_hashes(self._ids, size, cache_seed(digest, self._salt)) if size else []
            cached, promised = self._index.num_cached(chain), self._promised.num_promised(chain)
            known = self._known[digest, size] = _KnownBlocks(chain, cached, promised)
        return known


def destination(
    ids: Sequence[int],
    here: WorkerFacts,
    workers: Iterable[WorkerFacts],
    mixing: Mixing,
    rng: Random,
) -> bytes | None:
    """Boot id of the decode worker of least cost that has room for a running request's KV and
    takes it from the one where it runs; None: there is none. `ids`: as FactsOfWorkers has them."""
    fit = [
        other
        for other in workers
        if other.boot != here.boot
        and other.free_tokens >= len(ids)
        and mismatch(here.kind, other.kind, mixing) is None
    ]
    found = pick_decode(PromptFacts(len(ids) - 1), fit, rng)
    return None if found is None else found.boot
