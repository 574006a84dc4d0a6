"""What the placement policy knows of each worker about one prompt."""

from collections.abc import Iterable, Mapping, Sequence
from random import Random

from pdserve.engine.kv.block_hash import cache_seed, chain_hashes
from pdserve.engine.kv.identity import Mixing
from pdserve.services.router.fleet.fleet import Worker
from pdserve.services.router.placement.policy import PromptFacts, WorkerFacts, mismatch, pick_decode
from pdserve.services.router.placement.promised_chains import PromisedChains


class FactsOfWorkers:
    """The prompt is hashed at most once for each kind of worker."""

    def __init__(
        self,
        ids: Sequence[int],
        cache_salt: bytes,
        verified: Mapping[bytes, int],
        promised: PromisedChains,
        now: float,
    ) -> None:
        self._ids = ids[:-1]  # the last one always runs as a decode row, so it is never a hit
        self._salt = cache_salt
        self._verified = verified  # by boot: tokens whose prefix events may be on their way
        self._promised = promised
        self._now = now
        self._chains: dict[tuple[bytes, int], list[bytes]] = {}

    def of(self, worker: Worker) -> WorkerFacts:
        """What the policy knows of this worker about this prompt."""
        requests, waiting = worker.expected(self._now)
        chain = self.chain(worker)
        block_size = worker.layout.block_size
        cached = worker.prefixes.num_cached(chain) * block_size
        return WorkerFacts(
            boot=worker.boot,
            kv_identity=worker.identity,
            requests=requests,
            waiting_tokens=waiting,
            cached_tokens=max(cached, self._verified.get(worker.boot, 0)),
            promised_tokens=self._promised.num_promised(worker.boot, chain) * block_size,
            wire_version=worker.hello.wire_version,
            transports=tuple(worker.hello.transports),
            layout=worker.layout,
            encrypts=worker.hello.encrypt_kv,
            free_tokens=worker.free_tokens,
        )

    def chain(self, worker: Worker) -> list[bytes]:
        """Chain hashes of the prompt's full blocks, as that worker makes them."""
        size = worker.layout.block_size
        kind = worker.identity.digest, size
        if kind not in self._chains:
            seed = cache_seed(worker.identity.digest, self._salt)
            self._chains[kind] = chain_hashes(self._ids, size, seed) if size else []
        return self._chains[kind]


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
