"""One worker as the router knows it, and the facts about it that the placement policy uses;
pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import TypeVar

from pdserve.engine.kv import KvIdentity, KvSpec, decode_spec
from pdserve.protos import fleet_pb2 as pb
from pdserve.services.common.capabilities import only_pools, pooling_of
from pdserve.services.common.stall_detector import StallDetector
from pdserve.services.router.fleet.prefix_index import WorkerPrefixes

UNREPORTED_S = 1.0  # after this a command that no load names counts as reported
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """What workers with the same model, build and options have in common: KV identity and layout,
    wire version, transports and encryption. Equal workers share one object, because each placement
    compares it."""

    identity: KvIdentity
    wire_version: int
    transports: tuple[str, ...]
    layout: KvSpec
    encrypts: bool


@dataclass(slots=True)
class WorkerFacts:
    """Facts about one worker that the placement policy decides by. Never changed after
    construction, but not a frozen dataclass, which takes five times as long to construct; this
    happens at each load report."""

    incarnation: bytes
    kind: WorkerKind
    requests: int = 0  # running, waiting, and sent by this router but not yet reported
    waiting_tokens: int = 0  # prompt tokens not computed yet, also those sent but not reported
    free_tokens: int = 0  # decode: room for KV, less what is promised to hand-offs
    # Tokens of one prompt; 0 in the facts that a Worker keeps, which concern no prompt.
    cached_tokens: int = 0
    promised_tokens: int = 0  # from its start, cached or in transfer for other requests

    def of_prompt(self, cached_tokens: int, promised_tokens: int) -> "WorkerFacts":
        """Return a copy of the facts for one prompt, of which the worker has `cached_tokens` tokens
        in its cache and is promised the first `promised_tokens`."""
        # By position: names take twice as long, and `replace` six times.
        return WorkerFacts(
            self.incarnation,
            self.kind,
            self.requests,
            self.waiting_tokens,
            self.free_tokens,
            cached_tokens,
            promised_tokens,
        )


@lru_cache(maxsize=1024)
def _shared(value: T) -> T:
    """Return one and the same object for all equal values."""
    return value


class State(Enum):
    """State of a worker in the router's fleet (diagram in fleet.py)."""

    LIVE = "live"
    SUSPECT = "suspect"
    DRAINING = "draining"
    FROZEN = "frozen"
    LEAVING = "leaving"


@dataclass(eq=False, slots=True)
class Worker:
    """One life of a worker process as the router knows it; after a restart the process is a new
    Worker."""

    hello: pb.WorkerHello
    lease: int  # number of its current join stream; 0: that has ended
    heard: float  # last report on the join stream
    witnessed: float  # last byte on any stream
    prefixes: WorkerPrefixes
    state: State = State.LIVE
    suspect_since: float = 0.0
    draining: bool = False
    leaving: bool = False  # deregistered from this router only
    frozen: bool = False
    engine: StallDetector = field(default_factory=StallDetector)
    connected: bool = False  # the router's session to it is up
    was_connected: bool = False  # the session has been up, so the hello is true
    busy_until: float = 0.0  # set by Busy, cleared by a new load
    load: pb.Load = field(default_factory=pb.Load, init=False)
    # Commands of this router that no load has included yet: attempt -> (prompt tokens, sent).
    unreported: dict[bytes, tuple[int, float]] = field(default_factory=dict, init=False)
    # From its registration (`hello`).
    role: pb.Role = field(init=False)
    incarnation: bytes = field(init=False)
    address: str = field(init=False)
    model: str = field(init=False)
    identity: KvIdentity = field(init=False)
    pooling: str = field(init=False)  # of its embeddings or scores; empty: it computes neither
    only_pools: bool = field(init=False)  # it computes no tokens
    kind: WorkerKind = field(init=False)
    # From the load and `unreported`: rebuilt when one of them changes, not on read, because every
    # placement reads it.
    facts: WorkerFacts = field(init=False)
    _unreported_tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        hello = self.hello
        self.role, self.incarnation, self.address = hello.role, hello.incarnation, hello.address
        self.model = hello.card.name
        self.kind = _shared(
            WorkerKind(
                _shared(KvIdentity.of(hello.card.kv_identity)),
                hello.wire_version,
                _shared(tuple(hello.transports)),
                _shared(decode_spec(hello.card.kv_spec)),
                hello.encrypt_kv,
            )
        )
        self.identity = self.kind.identity
        self.pooling = pooling_of(hello.card)
        self.only_pools = only_pools(hello.card)
        self.facts = WorkerFacts(self.incarnation, self.kind)

    @property
    def host(self) -> str:
        """Host of the worker's address, without the port."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def stays(self) -> bool:
        """Whether this router may send the worker new work in the future: it neither drains nor has
        deregistered from this router."""
        return not self.draining and not self.leaving

    @property
    def goes_on_alone(self) -> bool:
        """Whether the worker has deregistered from this router but still reports running requests
        on its session, so that it may be silent on the join stream."""
        return self.leaving and self.connected

    def set_state(self) -> None:
        """Set the state by the flags `frozen`, `draining` and `leaving` after a message from the
        worker, which is therefore not suspect."""
        if self.frozen:
            self.state = State.FROZEN
        elif self.draining:
            self.state = State.DRAINING
        else:
            self.state = State.LEAVING if self.leaving else State.LIVE

    def commanded(self, attempt: bytes, tokens: int, now: float) -> None:
        """Count an attempt that this router sent to the worker, with `tokens` prompt tokens to
        compute, until a load report of the worker includes it."""
        # Moves to the end: loads and age forget in the order of sending.
        if attempt in self.unreported:
            self._forget(attempt)
        self.unreported[attempt] = (tokens, now)
        self._unreported_tokens += tokens
        self._update_facts()

    def forget_command(self, attempt: bytes) -> None:
        """Stop counting the command of an attempt that is over; no effect if it is not counted."""
        if attempt in self.unreported:
            self._forget(attempt)
            self._update_facts()

    def forget_old_commands(self, now: float) -> None:
        """Stop counting commands that were sent UNREPORTED_S ago or earlier and that no load report
        has included."""
        num_before = len(self.unreported)
        while self.unreported:
            attempt, (_, sent) = next(iter(self.unreported.items()))
            if now - sent < UNREPORTED_S:
                break
            self._forget(attempt)
        if len(self.unreported) < num_before:
            self._update_facts()

    def report(self, load: pb.Load) -> None:
        """Store the worker's new load report, and stop counting the commands that it includes. The
        worker no longer counts as busy."""
        self.load = load
        self.busy_until = 0.0
        if load.last_command in self.unreported:
            for attempt in list(self.unreported):
                self._forget(attempt)
                if attempt == load.last_command:
                    break
        self._update_facts()

    def _forget(self, attempt: bytes) -> None:
        self._unreported_tokens -= self.unreported.pop(attempt)[0]

    def _update_facts(self) -> None:
        load = self.load
        blocks = load.blocks_free + load.blocks_cached
        # By position: names take twice as long.
        self.facts = WorkerFacts(
            self.incarnation,
            self.kind,
            load.running + load.waiting + len(self.unreported),
            load.waiting_tokens + self._unreported_tokens,
            blocks * self.kind.layout.block_size - load.promised_tokens,
        )


def taking_work(workers: Iterable[Worker], now: float) -> list[Worker]:
    """Return the workers that accept a new command now: they are live and connected, and not
    busy."""
    live = State.LIVE
    return [w for w in workers if w.state is live and w.connected and now >= w.busy_until]
