"""The decode worker's engine thread, with its Receiver of KV and its Sender for migrating requests.

The engine thread owns the engine, the Receiver and the Sender; other threads post work to it.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from pdserve.engine.api import Request, Step
from pdserve.engine.checkpoints import CardData
from pdserve.engine.engine import Engine, Frozen
from pdserve.engine.handoff.incoming import Received
from pdserve.engine.handoff.outgoing import Sent
from pdserve.engine.handoff.protocol import Ticket
from pdserve.engine.handoff.receiver import Receiver
from pdserve.engine.handoff.recorder import EventLog
from pdserve.engine.handoff.sender import Sender
from pdserve.engine.scheduling import EngineStats
from pdserve.protos import fleet_pb2
from pdserve.services.common.rpc import advertised
from pdserve.services.decode.leases import LeaseFigures
from pdserve.services.decode.single_flight import SharingPolicy, SingleFlight
from pdserve.services.worker.runtime import WorkerRuntime, load_of
from pdserve.services.worker.settings import DecodeSettings

REFUSED = {  # receiver's counter: the metric's reason
    "corrupt_frames": "payload",  # its tag does not match; requested again
    "refused": "tag",  # of a header or a message
    "unfit_frames": "unfit",  # wrong place or content for the prompt
    "late_frames": "late",  # of an attempt that has ended
    "unproven_refused": "stranger",  # connections
}
DEADLINE_SLACK_S = 1.0  # the service ends a request at its deadline; the hand-off only if it fails
MIGRATION_S = 2.0  # longest pause of a stream by a hand-off; then the request continues here


class OutgoingMigrations:
    """Migrations of requests from this decode worker to others; runs on the engine thread.

        running --freeze--> frozen --send--> sent --Complete of the other side--> gone
           ^                   |               |
           +-----unfreeze------+---------------+   or any other end of the hand-off

    Only this engine computes a request's next token until the other worker has verified every
    block; from then on only that worker does. A frozen request has no steps, and it continues here
    only if the hand-off ends without Complete. If only the Complete message is lost, both workers
    may compute the same tokens, and the router takes those of one attempt.

    Calls `on_ended(attempt, sent)` at the end of every hand-off that `unfreeze` did not end.
    """

    def __init__(
        self, engine: Engine, sender: Sender, on_ended: Callable[[bytes, Sent], None]
    ) -> None:
        self.num_gone = 0
        self.num_stayed = 0
        self._engine = engine
        self._sender = sender
        self._on_ended = on_ended
        self._frozen: dict[bytes, Frozen] = {}
        self._sent: dict[bytes, bytes] = {}  # attempt here -> attempt at the other worker
        self._sources: dict[bytes, bytes] = {}  # attempt at the other worker -> attempt here

    def freeze(self, attempt: bytes) -> Frozen | None:
        """Stop the request's steps before a migration. Returns None if the request cannot migrate
        now."""
        held = self._engine.freeze(attempt.hex())
        if held is not None:
            self._frozen[attempt] = held
        return held

    def send(self, attempt: bytes, ticket: Ticket, address: str, receiver: bytes) -> bool:
        """Send a frozen request's KV to the decode worker at `address`, under that worker's ticket.
        Returns False if the request is not frozen. `receiver`: digest of that worker's KV
        identity."""
        held = self._frozen.get(attempt)
        if held is None or attempt in self._sent:
            return False
        self._sent[attempt], self._sources[ticket.attempt] = ticket.attempt, attempt
        key, deadline = attempt.hex(), time.monotonic() + MIGRATION_S
        self._sender.send_held(ticket, address, key, held.num_tokens, deadline, receiver)
        return True

    def unfreeze(self, attempt: bytes) -> bool:
        """Let a frozen request continue on this worker, and cancel its hand-off. Returns False if
        the request was not frozen."""
        if self._frozen.pop(attempt, None) is None:
            return False
        target_attempt = self._sent.pop(attempt, None)
        if target_attempt is not None:
            del self._sources[target_attempt]
            self._sender.cancel(target_attempt, "the request stays at the source")
        self.num_stayed += 1
        self._engine.resume(attempt.hex())
        return True

    def ended(self, sent: Sent) -> None:
        """Process the end of one of the Sender's hand-offs: the request continues here if it
        failed, and is gone otherwise."""
        attempt = self._sources.pop(sent.attempt, None)
        if attempt is None:
            return
        del self._sent[attempt], self._frozen[attempt]
        if sent.reason:
            self.num_stayed += 1
            self._engine.resume(attempt.hex())
        else:
            self.num_gone += 1
        self._on_ended(attempt, sent)


@dataclass(frozen=True, slots=True)
class DecodeCallbacks:
    """Callbacks that a decode worker's engine thread calls; none may block."""

    on_step: Callable[[Step, float], None]  # with the time
    on_received: Callable[[Received], None]  # all KV of an attempt is here
    on_lost: Callable[[bytes, str], None]  # attempt, reason for the end of its hand-off
    on_verified: Callable[[bytes, int, int], None]  # attempt, tokens verified, tokens cached
    on_attached: Callable[[bytes], None]  # see SingleFlight
    on_place_again: Callable[[bytes, int, str], None]
    on_migration_ended: Callable[[bytes, Sent], None]  # see OutgoingMigrations


@dataclass(frozen=True, slots=True)
class AdmissionReply:
    """The engine thread's reply to an Admit: what the admitted attempt waits for. Neither field is
    set if decode computes the prompt itself."""

    ticket: Ticket | None = None  # for the prefill worker that sends its KV
    follows: bool = False  # waits for the KV of another attempt with a common prefix


class DecodeRuntime(WorkerRuntime):
    """The engine of a decode worker and its hand-offs: receives KV, generates tokens, and sends the
    KV of migrating requests."""

    role = fleet_pb2.DECODE

    def __init__(
        self,
        settings: DecodeSettings,
        engine: Engine,
        card: CardData,
        incarnation: bytes,
        callbacks: DecodeCallbacks,
        leases: LeaseFigures,
    ) -> None:
        super().__init__(settings, engine, incarnation)
        if not engine.limits.pooling:  # embeddings have no grammar
            engine.load_grammars()
        self._callbacks = callbacks
        self._leases = leases
        event_log = EventLog(self._ring)
        self.single_flight = SingleFlight(
            engine, callbacks.on_attached, callbacks.on_place_again, event_log
        )
        self.receiver = Receiver(
            engine,
            engine.kv,
            incarnation=incarnation,
            identity=engine.kv_identity,
            on_received=self._received,
            on_lost=self._lost,
            on_verified=self._verified,
            wake=self.thread.wake,
            liveness=self._liveness,
            mixing=self.mixing,
            encrypted=settings.encrypt_kv,
            event_log=event_log,
        )
        addresses = self.receiver.listen(
            self._make_transports(settings.data_bind), self._transport_is_chosen
        )
        self.sender = self._make_sender(
            self._usable_transports(settings.data_bind),
            lambda sent: self.migrations.ended(sent),
        )
        self.migrations = OutgoingMigrations(engine, self.sender, callbacks.on_migration_ended)
        self._begin(self._poll)
        self.data_address = ""
        if "tcp" in addresses:
            self.data_address = advertised(addresses["tcp"], settings.data_advertise)
        self._describe(card, list(addresses), self.data_address)
        self.figures["data_address"] = self.data_address

    @property
    def promised_tokens(self) -> int:
        """Number of tokens of KV for which the Receiver has promised room. Any thread may read it;
        it may be slightly out of date."""
        return self.receiver.promised_tokens

    # Posted by the loop

    def admit_local(
        self, attempt: bytes, request: Request, sharing: SharingPolicy
    ) -> "Future[AdmissionReply | None]":
        """Admit an attempt whose prompt decode computes: queue the prompt in the engine, at once or
        when KV of another attempt that it waits for has arrived. The future returns the
        AdmissionReply, or raises the engine's errors."""
        chain = self.engine.chain(request)

        def admit(engine: Engine) -> AdmissionReply | None:
            follows = self.single_flight.follows(request, chain, sharing)
            if not follows:
                engine.submit(request)
                self.single_flight.leads(request, chain, sharing)
            self._note_command(attempt)
            return AdmissionReply(follows=follows)

        return self.thread.post(admit)

    def admit_remote(
        self,
        attempt: bytes,
        request: Request,
        prefill_incarnation: bytes,
        deadline: float,
        sharing: SharingPolicy,
    ) -> "Future[AdmissionReply | None]":
        """Admit an attempt whose KV a prefill worker sends: promise room for the KV with a ticket,
        unless the attempt waits for another attempt's KV. The future returns the AdmissionReply or,
        if there is no room, None; it raises the engine's errors."""
        chain = self.engine.chain(request)

        def admit(engine: Engine) -> AdmissionReply | None:
            if self.single_flight.follows(request, chain, sharing):
                self._note_command(attempt)
                return AdmissionReply(follows=True)
            engine.limits.check(request)
            ticket = self.receiver.admit(
                attempt, request, prefill_incarnation, deadline + DEADLINE_SLACK_S
            )
            if ticket is None:
                return None
            self.single_flight.leads(request, chain, sharing)
            self._note_command(attempt)
            return AdmissionReply(ticket)

        return self.thread.post(admit)

    def cancel(self, attempt: bytes, choices: Sequence[int] = ()) -> None:
        """End an attempt, or only some of its choices, in any state, and free the blocks."""

        def cancel(engine: Engine) -> None:
            self.migrations.unfreeze(attempt)
            was_waiting = self.single_flight.cancel(attempt, choices)
            if choices:
                was_waiting |= self.receiver.cancel_choices(attempt, choices)
            else:
                was_waiting |= self.receiver.cancel(attempt, "cancelled")
            if not was_waiting:
                engine.abort(attempt.hex(), choices)
            self._changed = True

        self.thread.post(cancel)

    def park(self, attempt: bytes, parked: bool) -> None:
        """Stop the attempt's steps (`parked`), or let them continue. The reception of its KV
        continues in either case; its migration to another worker ends."""

        def park(engine: Engine) -> None:
            self.migrations.unfreeze(attempt)
            is_follower = self.single_flight.park(attempt, parked)
            if not is_follower and not self.receiver.park(attempt, parked):
                (engine.park if parked else engine.unpark)(attempt.hex())
            self._changed = True

        self.thread.post(park)

    def is_waiting(self, attempt: bytes) -> "Future[Any]":
        """Return a future that says whether the attempt still waits: none of its KV has been
        computed, and no room has been reserved for it."""

        def look(_: Engine) -> bool:
            first = self.single_flight.first(attempt)
            return self.receiver.is_waiting(first) or self.single_flight.is_queued(first)

        return self.thread.post(look)

    def freeze(self, attempt: bytes) -> "Future[Any]":
        """Stop the steps of a request before a migration.

        The future returns the engine's Frozen, or None if the request cannot migrate now.
        """
        return self.thread.post(lambda _: self.migrations.freeze(attempt))

    def migrate(
        self, attempt: bytes, ticket: Ticket, address: str, receiver: bytes
    ) -> "Future[Any]":
        """Send a frozen request's KV to the decode worker at `address`. The future returns False if
        the request is not frozen."""
        return self.thread.post(lambda _: self.migrations.send(attempt, ticket, address, receiver))

    def unfreeze(self, attempt: bytes) -> None:
        """Let a frozen or migrating request continue on this worker."""
        self.thread.post(lambda _: self.migrations.unfreeze(attempt))

    # On the engine thread

    @property
    def _endpoints(self) -> Sequence[Sender | Receiver]:
        return (self.receiver, self.sender)

    def _load(self, stats: EngineStats) -> fleet_pb2.Load:
        receiver, leases = self.receiver, self._leases
        stale = receiver.counters["stale"] + receiver.counters["late_frames"] + leases.stale
        load = load_of(stats, receiver.figures, receiver.refusals, stale)
        load.waiting += receiver.num_live + self.single_flight.num_waiting
        load.following = self.single_flight.num_waiting
        load.attached = self.single_flight.figures.attached
        load.placed_again = self.single_flight.figures.placed_again
        load.promised_tokens = receiver.promised_tokens
        load.reserved_idle_block_s = receiver.reserved_idle_block_s
        for counter, reason in REFUSED.items():
            load.refused_frames.add(reason=reason, count=receiver.counters[counter])
        load.inexact_handoffs = receiver.counters["inexact"]
        load.moved_away, load.stayed = self.migrations.num_gone, self.migrations.num_stayed
        load.parked, load.adopted = leases.parked, leases.adopted
        load.park_expired, load.park_evicted = leases.expired, leases.evicted
        return load

    def _poll(self) -> bool:
        live = self.receiver.num_live + self.sender.num_live
        more = self.receiver.poll()
        self.single_flight.poll()
        more |= self.sender.poll()
        self._changed |= bool(live)
        return more

    def _received(self, received: Received) -> None:
        self.single_flight.arrived(received.attempt, received.num_tokens, in_engine=True)
        self._callbacks.on_received(received)

    def _verified(self, attempt: bytes, tokens: int, cached_tokens: int) -> None:
        self.single_flight.arrived(attempt, tokens)
        self._callbacks.on_verified(attempt, tokens, cached_tokens)

    def _lost(self, attempt: bytes, reason: str) -> None:
        self.single_flight.over(attempt)
        self._callbacks.on_lost(attempt, reason)

    def _on_step(self, step: Step) -> None:
        self._changed = True
        self._callbacks.on_step(step, time.monotonic())
        if self.single_flight.on_step(step):
            self.thread.wake()
