"""Prefill's engine thread and Sender. The engine thread owns both; other threads post to it."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from pdserve.engine.api.request import Step
from pdserve.engine.checkpoints.card import CardData
from pdserve.engine.engine import Engine
from pdserve.engine.handoff.connection.dial import usable
from pdserve.engine.handoff.outgoing import Sent
from pdserve.engine.handoff.protocol.frames import WIRE_VERSION
from pdserve.engine.handoff.protocol.keys import Ticket
from pdserve.engine.handoff.protocol.layout import slot_bytes
from pdserve.engine.handoff.recorder.event_log import EventLog
from pdserve.engine.handoff.recorder.ring import open_ring
from pdserve.engine.handoff.sender import Sender
from pdserve.engine.kv.identity import Mixing
from pdserve.engine.thread import EngineThread
from pdserve.engine.transport.base import TransportOptions
from pdserve.engine.transport.cuda_ipc.device_cupy import opener
from pdserve.engine.transport.registry import make_transports
from pdserve.protos import fleet_pb2
from pdserve.services.prefill.settings import PrefillSettings
from pdserve.services.worker.audit import Audit
from pdserve.services.worker.card import model_card
from pdserve.services.worker.load import load_of
from pdserve.services.worker.shm_dir import host_id, shm_folder
from pdserve.services.worker.worker import Snapshot


class PrefillRuntime:
    """See services/worker/worker.py Part. Constructed on the loading thread.

    `on_ended` is called on the engine thread and must not block.
    """

    def __init__(
        self,
        settings: PrefillSettings,
        engine: Engine,
        card: CardData,
        boot: bytes,
        on_ended: Callable[[Sent], None],
    ) -> None:
        self.boot = boot
        self.mixing = Mixing(settings.allow_mixed_weights, settings.allow_mixed_numerics)
        self.engine = engine
        self.thread = EngineThread(engine, self._on_step)
        self._on_ended = on_ended
        self._changed = True
        self._last_command = b""
        self._audit = Audit()
        folder = shm_folder(settings.shm_dir)
        options = TransportOptions(
            shm_dir=folder,
            slot_bytes=slot_bytes(engine.kv.spec),
            device=opener(engine.kv, encrypted=settings.encrypt_kv),
        )
        chosen = settings.kv_transport != "auto"
        transports = usable(make_transports(settings.kv_transport, options), chosen)
        self._ring = open_ring(settings.trace_dir, "prefill", boot, settings.trace_mb)
        self._sender = Sender(
            engine,
            engine.kv,
            transports,
            boot=boot,
            identity=engine.kv_identity,
            on_ended=self._ended,
            wake=self.thread.wake,
            # The ticker wakes the thread while attempts live: one that does not turn is frozen.
            progress=lambda: (self.thread.steps, True),
            encrypted=settings.encrypt_kv,
            event_log=EventLog(self._ring),
        )
        self.thread.add_poll(self._sender.poll)
        self._sender.start()
        names = [transport.name for transport in transports]
        message, self.blobs = model_card(
            card, engine.kv.spec, engine.kv_identity.digest, engine.numerics_id
        )
        self.hello = fleet_pb2.WorkerHello(
            role=fleet_pb2.PREFILL,
            card=message,
            transports=names,
            wire_version=WIRE_VERSION,
            host_id=host_id(folder) if {"shm", "cuda_ipc"} & {*names} else "",
            encrypt_kv=settings.encrypt_kv,
        )
        self.figures = {
            "model": card.name,
            "kv_tokens": engine.kv.num_blocks * engine.kv.spec.block_size,
            "chunk_size": engine.limits.chunk_size,
            "transports": names,
        }

    @property
    def changed(self) -> bool:
        changed, self._changed = self._changed, False
        return changed

    # posted by the loop

    def start_sending(
        self,
        ticket: Ticket,
        address: str,
        ids: tuple[int, ...],
        cache_salt: bytes,
        deadline: float,
        receiver: bytes,
    ) -> "Future[Any]":
        """Queue a prompt. The future raises the engine's errors."""

        def start(_: Engine) -> None:
            self._sender.start_sending(ticket, address, ids, cache_salt, deadline, receiver)
            self._last_command = ticket.attempt
            self._changed = True

        return self.thread.post(start)

    def cancel(self, attempt: bytes) -> None:
        """End an attempt; a chunk that is being computed is the last."""

        def cancel(_: Engine) -> None:
            self._sender.cancel(attempt, "cancelled")
            self._changed = True

        self.thread.post(cancel)

    def hand_back(self) -> None:
        """End every attempt that has not begun."""
        self.thread.post(lambda _: self._sender.hand_back())

    # on the engine thread

    def snapshot(self) -> Snapshot:
        sender = self._sender
        load = load_of(
            self.engine.stats(), sender.figures, sender.refusals, sender.counters["stale"]
        )
        load.accounting_errors = self._audit.look(self.engine.discrepancy())
        load.last_command = self._last_command
        added, removed = self.engine.take_prefix_events()
        return load, added, removed

    def close(self) -> None:
        self.thread.close()
        self._sender.close()
        if self._ring is not None:
            self._ring.close()

    def _ended(self, sent: Sent) -> None:
        self._changed = True
        self._on_ended(sent)

    def _on_step(self, step: Step) -> None:
        self._changed = True
        self._sender.on_step(step)
