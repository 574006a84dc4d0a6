"""Decode's engine thread, Receiver and Sender (of requests that move away). The engine thread owns
them; other threads post to it."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from pdserve.engine.api.request import Request, Step
from pdserve.engine.checkpoints.card import CardData
from pdserve.engine.engine import Engine
from pdserve.engine.handoff.connection.dial import usable
from pdserve.engine.handoff.incoming import Received
from pdserve.engine.handoff.outgoing import Sent
from pdserve.engine.handoff.protocol.frames import WIRE_VERSION
from pdserve.engine.handoff.protocol.keys import Ticket
from pdserve.engine.handoff.protocol.layout import slot_bytes
from pdserve.engine.handoff.receiver import Receiver
from pdserve.engine.handoff.recorder.event_log import EventLog
from pdserve.engine.handoff.recorder.ring import open_ring
from pdserve.engine.handoff.sender import Sender
from pdserve.engine.kv.identity import Mixing
from pdserve.engine.thread import EngineThread
from pdserve.engine.transport.base import TransportOptions
from pdserve.engine.transport.cuda_ipc.device_cupy import opener
from pdserve.engine.transport.registry import make_transports
from pdserve.protos import fleet_pb2
from pdserve.services.decode.leases import LeaseFigures
from pdserve.services.decode.migration.departures import OutgoingMigrations
from pdserve.services.decode.settings import DecodeSettings
from pdserve.services.decode.single_flight.following import SharedPrefix, SingleFlight
from pdserve.services.host.addresses import advertised
from pdserve.services.worker.audit import Audit
from pdserve.services.worker.card import model_card
from pdserve.services.worker.load import load_of
from pdserve.services.worker.shm_dir import host_id, shm_folder
from pdserve.services.worker.worker import Snapshot

REFUSED = {  # counter of the receiver: reason, as the metric has it
    "corrupt_frames": "payload",  # its tag does not fit; asked for again
    "refused": "tag",  # of a header or a message
    "unfit_frames": "unfit",  # not where or what the prompt wants
    "late_frames": "late",  # of an attempt that has ended
    "unproven_refused": "stranger",  # connections
}
DEADLINE_SLACK_S = 1.0  # the service ends a request at its deadline; the hand-off only if it fails


@dataclass(frozen=True, slots=True)
class Sink:
    """Where the engine thread tells what happened; none of these may block."""

    step: Callable[[Step, float], None]
    received: Callable[[Received], None]
    lost: Callable[[bytes, str], None]
    verified: Callable[[bytes, int, int], None]
    attached: Callable[[bytes], None]
    again: Callable[[bytes, int, str], None]
    departed: Callable[[bytes, Sent], None]


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """A promise."""

    ticket: Ticket | None = None  # for whoever is to send the KV
    follows: bool = False  # it waits for the KV of others


class DecodeRuntime:
    """See services/worker/worker.py Part. Constructed on the loading thread."""

    def __init__(
        self,
        settings: DecodeSettings,
        engine: Engine,
        card: CardData,
        boot: bytes,
        sink: Sink,
        leases: LeaseFigures,
    ) -> None:
        self.engine = engine
        self.thread = EngineThread(engine, self._on_step)
        self._sink = sink
        self._leases = leases
        self.boot = boot
        self._changed = True
        self._last_command = b""
        self._audit = Audit()
        self._ring = open_ring(settings.trace_dir, "decode", boot, settings.trace_mb)
        trace = EventLog(self._ring)
        self._following = SingleFlight(engine, sink.attached, sink.again, trace)
        self._receiver = Receiver(
            engine,
            engine.kv,
            boot=boot,
            identity=engine.kv_identity,
            on_received=self._received,
            on_lost=self._lost,
            on_verified=self._verified,
            wake=self.thread.wake,
            # The ticker wakes the thread while attempts live: one that does not turn is frozen.
            progress=lambda: (self.thread.steps, True),
            mixing=Mixing(settings.allow_mixed_weights, settings.allow_mixed_numerics),
            encrypted=settings.encrypt_kv,
            event_log=trace,
        )
        folder = shm_folder(settings.shm_dir)
        options = TransportOptions(
            settings.data_bind,
            folder,
            slot_bytes(engine.kv.spec),
            device=opener(engine.kv, encrypted=settings.encrypt_kv),
        )
        transports = make_transports(settings.kv_transport, options)
        chosen = settings.kv_transport != "auto"
        addresses = self._receiver.listen(transports, chosen)
        self._sender = Sender(
            engine,
            engine.kv,
            usable(make_transports(settings.kv_transport, options), chosen),
            boot=boot,
            identity=engine.kv_identity,
            on_ended=lambda sent: self.departures.ended(sent),
            wake=self.thread.wake,
            progress=lambda: (self.thread.steps, True),
            encrypted=settings.encrypt_kv,
            event_log=EventLog(self._ring),
        )
        self.departures = OutgoingMigrations(engine, self._sender, sink.departed)
        self.thread.add_poll(self._poll)
        self._receiver.start()
        self._sender.start()
        self.data_address = ""
        if "tcp" in addresses:
            self.data_address = advertised(addresses["tcp"], settings.data_advertise)
        message, self.blobs = model_card(
            card, engine.kv.spec, engine.kv_identity.digest, engine.numerics_id
        )
        self.hello = fleet_pb2.WorkerHello(
            role=fleet_pb2.DECODE,
            data_address=self.data_address,
            card=message,
            transports=list(addresses),
            wire_version=WIRE_VERSION,
            host_id=host_id(folder) if {"shm", "cuda_ipc"} & {*addresses} else "",
            encrypt_kv=settings.encrypt_kv,
        )
        self.figures = {
            "model": card.name,
            "kv_tokens": engine.kv.num_blocks * engine.kv.spec.block_size,
            "chunk_size": engine.limits.chunk_size,
            "data_address": self.data_address,
            "transports": list(addresses),
        }

    @property
    def changed(self) -> bool:
        changed, self._changed = self._changed, False
        return changed

    @property
    def promised_tokens(self) -> int:
        """Any thread may read it; it can be a moment old."""
        return self._receiver.promised_tokens

    # posted by the loop

    def admit_local(
        self, attempt: bytes, request: Request, sharing: SharedPrefix
    ) -> "Future[AdmissionRequest | None]":
        """The engine queues the prompt itself, at once or when what it waits for is there. The
        future raises the engine's errors."""
        chain = self.engine.chain(request)

        def admit(engine: Engine) -> AdmissionRequest | None:
            follows = self._following.follows(request, chain, sharing)
            if not follows:
                engine.submit(request)
                self._following.leads(request, chain, sharing)
            self._command(attempt)
            return AdmissionRequest(follows=follows)

        return self.thread.post(admit)

    def admit_remote(
        self,
        attempt: bytes,
        request: Request,
        prefill_boot: bytes,
        deadline: float,
        sharing: SharedPrefix,
    ) -> "Future[AdmissionRequest | None]":
        """With a ticket for `prefill_boot`, unless it waits; None: there is no room. The future
        raises the engine's errors."""
        chain = self.engine.chain(request)

        def admit(engine: Engine) -> AdmissionRequest | None:
            if self._following.follows(request, chain, sharing):
                self._command(attempt)
                return AdmissionRequest(follows=True)
            engine.limits.check(request)
            ticket = self._receiver.admit(
                attempt, request, prefill_boot, deadline + DEADLINE_SLACK_S
            )
            if ticket is None:
                return None
            self._following.leads(request, chain, sharing)
            self._command(attempt)
            return AdmissionRequest(ticket)

        return self.thread.post(admit)

    def cancel(self, attempt: bytes, choices: Sequence[int] = ()) -> None:
        """End an attempt, or some of its choices, wherever it is; its blocks are free then."""

        def cancel(engine: Engine) -> None:
            self.departures.stay(attempt)
            known = self._following.cancel(attempt, choices)
            if choices:
                known |= self._receiver.cancel_choices(attempt, choices)
            else:
                known |= self._receiver.cancel(attempt, "cancelled")
            if not known:
                engine.abort(attempt.hex(), choices)
            self._changed = True

        self.thread.post(cancel)

    def park(self, attempt: bytes, parked: bool) -> None:
        """No steps from here on, or steps again; a hand-off goes on either way."""

        def park(engine: Engine) -> None:
            self.departures.stay(attempt)
            known = self._following.park(attempt, parked)
            if not known and not self._receiver.park(attempt, parked):
                (engine.park if parked else engine.unpark)(attempt.hex())
            self._changed = True

        self.thread.post(park)

    def is_waiting(self, attempt: bytes) -> "Future[Any]":
        """Whether a hand-off is live and has no blocks yet, or it waits for KV that nobody has
        begun to compute."""

        def look(_: Engine) -> bool:
            first = self._following.first(attempt)
            return self._receiver.is_waiting(first) or self._following.is_queued(first)

        return self.thread.post(look)

    def hold(self, attempt: bytes) -> "Future[Any]":
        """Stop a request for a move: Held, or None if it cannot move."""
        return self.thread.post(lambda _: self.departures.hold(attempt))

    def move(self, attempt: bytes, ticket: Ticket, address: str, receiver: bytes) -> "Future[Any]":
        """Send a held request's KV; False: it is not held."""
        return self.thread.post(lambda _: self.departures.send(attempt, ticket, address, receiver))

    def stay(self, attempt: bytes) -> None:
        """A held or moving request goes on here."""
        self.thread.post(lambda _: self.departures.stay(attempt))

    # on the engine thread

    def snapshot(self) -> Snapshot:
        receiver = self._receiver
        stats = self.engine.stats()
        leases = self._leases
        stale = receiver.counters["stale"] + receiver.counters["late_frames"] + leases.stale
        load = load_of(stats, receiver.figures, receiver.refusals, stale)
        load.waiting += receiver.num_live + self._following.num_waiting
        load.following = self._following.num_waiting
        load.attached = self._following.figures.attached
        load.placed_again = self._following.figures.placed_again
        load.promised_tokens = receiver.promised_tokens
        load.reserved_idle_block_s = receiver.reserved_idle_block_s
        for counter, reason in REFUSED.items():
            load.refused_frames.add(reason=reason, count=receiver.counters[counter])
        load.accounting_errors = self._audit.look(self.engine.discrepancy())
        load.inexact_handoffs = receiver.counters["inexact"]
        load.last_command = self._last_command
        load.moved_away, load.stayed = self.departures.num_gone, self.departures.num_stayed
        load.parked, load.adopted = leases.parked, leases.adopted
        load.park_expired, load.park_evicted = leases.expired, leases.evicted
        added, removed = self.engine.take_prefix_events()
        return load, added, removed

    def close(self) -> None:
        self.thread.close()
        self._receiver.close()
        self._sender.close()
        if self._ring is not None:
            self._ring.close()

    def _command(self, attempt: bytes) -> None:
        self._last_command = attempt
        self._changed = True

    def _poll(self) -> bool:
        live = self._receiver.num_live + self._sender.num_live
        more = self._receiver.poll()
        self._following.poll()
        more |= self._sender.poll()
        self._changed |= bool(live)
        return more

    def _received(self, received: Received) -> None:
        self._following.arrived(received.attempt, received.num_tokens, landed=True)
        self._sink.received(received)

    def _verified(self, attempt: bytes, tokens: int, cached_tokens: int) -> None:
        self._following.arrived(attempt, tokens)
        self._sink.verified(attempt, tokens, cached_tokens)

    def _lost(self, attempt: bytes, reason: str) -> None:
        self._following.over(attempt)
        self._sink.lost(attempt, reason)

    def _on_step(self, step: Step) -> None:
        self._changed = True
        self._sink.step(step, time.monotonic())
        if self._following.on_step(step):
            self.thread.wake()
