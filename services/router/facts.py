"""What the policy is told of each worker about one prompt."""

from collections.abc import Mapping, Sequence

from pdserve.engine.block_hash import cache_seed, chain_hashes
from pdserve.services.router.fleet import Worker
from pdserve.services.router.policy import WorkerFacts


class FactsOfWorkers:
    """The prompt is hashed at most once for each kind of worker."""

    def __init__(
        self, ids: Sequence[int], cache_salt: bytes, verified: Mapping[bytes, int], now: float
    ) -> None:
        self._ids = ids[:-1]  # the last one always runs as a decode row, so it is never a hit
        self._salt = cache_salt
        self._verified = verified  # by boot: tokens whose prefix events may be on their way
        self._now = now
        self._chains: dict[tuple[bytes, int], list[bytes]] = {}

    def of(self, worker: Worker) -> WorkerFacts:
        """As the policy sees it."""
        requests, waiting = worker.expected(self._now)
        return WorkerFacts(
            boot=worker.boot,
            kv_identity=worker.identity,
            requests=requests,
            waiting_tokens=waiting,
            cached_tokens=max(self._cached(worker), self._verified.get(worker.boot, 0)),
            wire_version=worker.hello.wire_version,
            transports=tuple(worker.hello.transports),
            layout=worker.layout,
            encrypts=worker.hello.encrypt_kv,
        )

    def _cached(self, worker: Worker) -> int:
        card = worker.hello.card
        block_size = card.kv_spec.block_size
        if not len(worker.prefixes) or not block_size:
            return 0
        kind = (card.kv_identity, block_size)
        if kind not in self._chains:
            seed = cache_seed(card.kv_identity, self._salt)
            self._chains[kind] = chain_hashes(self._ids, block_size, seed)
        return worker.prefixes.num_cached(self._chains[kind]) * block_size
