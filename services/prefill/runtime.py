"""Prefill's engine thread and Sender. The engine thread owns both; other threads post to it."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from pdserve.engine.api.request import Step
from pdserve.engine.checkpoints.card import CardData
from pdserve.engine.engine import Engine
from pdserve.engine.handoff.outgoing import Sent
from pdserve.engine.handoff.protocol.keys import Ticket
from pdserve.engine.handoff.sender import PromptToSend, Sender
from pdserve.engine.scheduling.stats import EngineStats
from pdserve.protos import fleet_pb2
from pdserve.services.prefill.settings import PrefillSettings
from pdserve.services.worker.runtime import WorkerRuntime, load_of


class PrefillRuntime(WorkerRuntime):
    """Computes prompts and sends their KV.

    `on_ended` is called on the engine thread and must not block.
    """

    role = fleet_pb2.PREFILL

    def __init__(
        self,
        settings: PrefillSettings,
        engine: Engine,
        card: CardData,
        boot: bytes,
        on_ended: Callable[[Sent], None],
    ) -> None:
        super().__init__(settings, engine, boot)
        self._on_ended = on_ended
        transports = self._usable_transports()
        self.sender = self._make_sender(transports, self._ended)
        self._begin(self.sender.poll)
        self._describe(card, [transport.name for transport in transports])

    # Posted by the loop

    def start_sending(
        self,
        ticket: Ticket,
        address: str,
        prompt: PromptToSend,
        deadline: float,
        receiver: bytes,
    ) -> "Future[Any]":
        """Queue a prompt. The future raises the engine's errors."""

        def start(_: Engine) -> None:
            self.sender.start_sending(ticket, address, prompt, deadline, receiver)
            self._note_command(ticket.attempt)

        return self.thread.post(start)

    def cancel(self, attempt: bytes) -> None:
        """End an attempt; a chunk that is being computed is the last one."""

        def cancel(_: Engine) -> None:
            self.sender.cancel(attempt, "cancelled")
            self._changed = True

        self.thread.post(cancel)

    def hand_back(self) -> None:
        """End every attempt that has not begun."""
        self.thread.post(lambda _: self.sender.hand_back())

    # On the engine thread

    @property
    def _endpoints(self) -> Sequence[Sender]:
        return (self.sender,)

    def _load(self, stats: EngineStats) -> fleet_pb2.Load:
        sender = self.sender
        return load_of(stats, sender.figures, sender.refusals, sender.counters["stale"])

    def _ended(self, sent: Sent) -> None:
        self._changed = True
        self._on_ended(sent)

    def _on_step(self, step: Step) -> None:
        self._changed = True
        self.sender.on_step(step)
