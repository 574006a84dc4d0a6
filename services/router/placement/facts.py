"""What the placement policy knows of each worker about one prompt."""

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from pdserve.engine.kv.block_hash import cache_seed, chain_hashes
from pdserve.engine.kv.identity import Mixing
from pdserve.services.router.fleet.fleet import Worker
from pdserve.services.router.fleet.prefix_index import PrefixIndex
from pdserve.services.router.placement.policy import PromptFacts, WorkerFacts, mismatch, pick_decode
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
        self._known: dict[tuple[bytes, int], _KnownBlocks] = {}

    def of(self, worker: Worker) -> WorkerFacts:
        """What the policy knows of this worker about this prompt."""
        boot, size = worker.boot, worker.layout.block_size
        known = self._known.get((worker.identity.digest, size)) or self._look_up(worker)
        requests, waiting_tokens = worker.expected(self._now)
        cached_tokens = known.num_cached.get(worker.prefixes.bit, 0) * size
        if self._verified:
            cached_tokens = max(cached_tokens, self._verified.get(boot, 0))
        # By position: names take twice as long, and this runs for each worker and request.
        return WorkerFacts(
            boot,
            worker.identity,
            requests,
            waiting_tokens,
            cached_tokens,
            known.num_promised.get(boot, 0) * size,
            worker.wire_version,
            worker.transports,
            worker.layout,
            worker.encrypts,
            worker.free_tokens,
        )

    def chain(self, worker: Worker) -> list[bytes]:
        """Chain hashes of the prompt's full blocks, as that worker makes them."""
        kind = worker.identity.digest, worker.layout.block_size
        return (self._known.get(kind) or self._look_up(worker)).chain

    def _look_up(self, worker: Worker) -> _KnownBlocks:
        digest, size = worker.identity.digest, worker.layout.block_size
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
        and mismatch(here, other, mixing) is None
    ]
    found = pick_decode(PromptFacts(len(ids) - 1), fit, rng)
    return None if found is None else found.boot
