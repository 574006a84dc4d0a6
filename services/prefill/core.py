"""The attempts at requests in a prefill worker, from PrefillStart to PrefillDone or PrefillFailed,
and its runtime.

Everything runs on the event loop; PrefillRuntime posts work to the engine thread. Attempts continue
when the session of their router ends; if no router needs an attempt any more, the decode worker
ends it by a Gone in response to its Claim. A router that takes an attempt over from another sends
its PrefillStart again, and receives the attempt's events from then on. If the attempt has ended,
its last event is sent again, since the router that received it first may be gone.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from pdserve.engine.api import EngineError, QueueFull, Step
from pdserve.engine.checkpoints import CardData
from pdserve.engine.engine import Engine
from pdserve.engine.handoff.outgoing import HANDED_BACK, Sent
from pdserve.engine.handoff.protocol import ID_BYTES, SECRET_BYTES, Ticket
from pdserve.engine.handoff.sender import PromptToSend, Sender
from pdserve.engine.kv import KvIdentity, refusal
from pdserve.engine.scheduling import EngineStats
from pdserve.protos import common_pb2 as pb
from pdserve.protos import fleet_pb2
from pdserve.protos import worker_pb2 as wire
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rpc import Outbox
from pdserve.services.common.tracing import NO_TRACER, TraceContext, Tracer, TraceSpan
from pdserve.services.worker.core import RouterSession, WorkerCore, service_error, when_done
from pdserve.services.worker.runtime import WorkerRuntime, load_of
from pdserve.services.worker.settings import PrefillSettings

log = logging.getLogger(__name__)
MAX_ENDED = 1024  # attempts whose last event is kept for a late PrefillStart
PrefillSession = RouterSession[Outbox[wire.PrefillEvent]]


class PrefillRuntime(WorkerRuntime):
    """The engine thread of a prefill worker: computes prompts and sends their KV.

    `on_ended` is called on the engine thread when a hand-off ends, and must not block.
    """

    role = fleet_pb2.PREFILL

    def __init__(
        self,
        settings: PrefillSettings,
        engine: Engine,
        card: CardData,
        incarnation: bytes,
        on_ended: Callable[[Sent], None],
    ) -> None:
        super().__init__(settings, engine, incarnation)
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
        """Queue a prompt whose KV is to be computed and sent to the decode worker at `address`. The
        future raises the engine's errors."""

        def start(_: Engine) -> None:
            self.sender.start_sending(ticket, address, prompt, deadline, receiver)
            self._note_command(ticket.attempt)

        return self.thread.post(start)

    def cancel(self, attempt: bytes) -> None:
        """Cancel an attempt on the engine thread. A chunk of the prompt that is being computed is
        completed; no other one is computed."""

        def cancel(_: Engine) -> None:
            self.sender.cancel(attempt, "cancelled")
            self._changed = True

        self.thread.post(cancel)

    def hand_back(self) -> None:
        """End every attempt whose computation has not begun, so that the routers place it on
        another worker."""
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


@dataclass(slots=True)
class SendingAttempt:
    """A running attempt: a prompt whose KV this worker computes and sends."""

    owner: PrefillSession  # receives the attempt's events
    request: str
    ticket: bytes  # its id
    span: TraceSpan


@dataclass(frozen=True, slots=True)
class EndedAttempt:
    """An attempt that has ended: its last event, and its request id for the log."""

    event: wire.PrefillEvent
    request: str


class PrefillCore(WorkerCore[PrefillRuntime, Outbox[wire.PrefillEvent]]):
    """All attempts at requests in one prefill worker."""

    def __init__(self, tracer: Tracer = NO_TRACER) -> None:
        super().__init__(Outbox[wire.PrefillEvent])
        self._tracer = tracer
        self._sending: dict[bytes, SendingAttempt] = {}  # by attempt id, like `_ended`
        self._ended: OrderedDict[bytes, EndedAttempt] = OrderedDict()  # the oldest first

    @property
    def num_attempts(self) -> int:
        """The number of attempts that are running, that is, have not ended."""
        return len(self._sending)

    async def drain(self) -> None:
        """Finish the attempts whose computation has begun; hand the others back to the routers,
        which place them on other workers."""
        self._draining = True
        if self._runtime is not None:
            self._runtime.hand_back()
        await super().drain()

    def start(self, session: PrefillSession, start: wire.PrefillStart, ids: Sequence[int]) -> None:
        """Start an attempt. The router receives PrefillAccepted, Busy or PrefillFailed; if the
        attempt has already ended, its last event again."""
        if self._answer_repeat(session, start):
            return
        try:
            runtime = self._runtime
            if runtime is None or self._draining:
                raise ServiceError(
                    pb.UNAVAILABLE, "the worker is loading or draining; it does not accept new work"
                )
            ticket = self._ticket(start, runtime)
        except ServiceError as error:
            self.refuse(session, start.attempt, error)
            return
        now = time.monotonic()
        span = self._span(start, len(ids), now)
        attempt = SendingAttempt(session, start.request, ticket.id, span)
        self._sending[start.attempt] = attempt
        self._empty.clear()
        deadline = now + start.remaining_ms / 1000 if start.remaining_ms else float("inf")
        address, receiver = start.ticket.data_address, start.kv_identity.digest
        prompt = PromptToSend(tuple(ids), start.cache_salt, start.tenant, start.priority)
        future = runtime.start_sending(ticket, address, prompt, deadline, receiver)
        when_done(future, partial(self._started, start.attempt))

    def refuse(self, session: PrefillSession, attempt: bytes, error: ServiceError) -> None:
        """Send PrefillFailed to the router for a PrefillStart that cannot start an attempt."""
        session.outbox.put(_failed(attempt, error, handed_back=self._draining))

    def cancel(self, session: PrefillSession, attempt: bytes) -> None:
        """Cancel an attempt. The router receives no event of it, unless it starts the attempt
        again. If the attempt is unknown or belongs to another live session by now, only count the
        message as stale."""
        sending = self._sending.get(attempt)
        owner = None if sending is None else sending.owner
        if self._runtime is None or owner is None or (owner is not session and not owner.lost):
            self.num_stale += 1
            return
        error = ServiceError(pb.UNAVAILABLE, "cancelled")
        self._remember(attempt, _failed(attempt, error), "cancelled")
        self._runtime.cancel(attempt)

    def on_ended(self, sent: Sent) -> None:
        """Handle the end of an attempt's KV hand-off: log it, and send PrefillDone or PrefillFailed
        to the router unless the attempt was cancelled."""
        sending = self._sending.get(sent.attempt)
        if sending is None:
            ended = self._ended.get(sent.attempt)  # it was cancelled
            _log(sent, "" if ended is None else ended.request)
            return
        _log(sent, sending.request)
        _add_phases(sending.span, sent)
        event = _end_of(sent)
        if handed_back := sent.reason == HANDED_BACK:
            sending.span.event(HANDED_BACK)
        self._remember(sent.attempt, event, "" if handed_back else sent.reason)
        sending.owner.outbox.put(event)

    def _answer_repeat(self, session: PrefillSession, start: wire.PrefillStart) -> bool:
        """Answer a repeated PrefillStart. If its attempt has ended, send the last event again; if
        it runs with the same ticket, send its events to this session from now on. Returns False if
        the PrefillStart is not a repeated one."""
        ended = self._ended.get(start.attempt)
        if ended is not None:
            session.outbox.put(ended.event)
            return True
        sending = self._sending.get(start.attempt)
        if sending is None or sending.ticket != start.ticket.id:
            return False
        sending.owner = session
        accepted = wire.PrefillAccepted(attempt=start.attempt)
        session.outbox.put(wire.PrefillEvent(accepted=accepted))
        return True

    def _remember(self, attempt: bytes, event: wire.PrefillEvent, error: str) -> None:
        """Move an attempt from the running to the ended ones, with its last event. `error`: why it
        failed; empty if it did not."""
        sending = self._forget(attempt, error)
        self._ended[attempt] = EndedAttempt(event, sending.request)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _ticket(self, start: wire.PrefillStart, runtime: PrefillRuntime) -> Ticket:
        wire_ticket = start.ticket
        for name, value, size in (
            ("attempt", start.attempt, ID_BYTES),
            ("ticket.id", wire_ticket.id, ID_BYTES),
            ("ticket.secret", wire_ticket.secret, SECRET_BYTES),
            ("ticket.decode_incarnation", wire_ticket.decode_incarnation, ID_BYTES),
        ):
            if len(value) != size:
                raise ServiceError(pb.INVALID_ARGUMENT, f"{name} must have {size} bytes", name)
        if start.attempt in self._sending:
            raise ServiceError(pb.INVALID_ARGUMENT, "the attempt id is already in use", "attempt")
        receiver_identity = KvIdentity.of(start.kv_identity)
        difference = refusal(
            runtime.engine.kv_identity,
            receiver_identity,
            runtime.mixing,
            ("at prefill", "at decode"),
        )
        if difference is not None:
            raise ServiceError(pb.INVALID_ARGUMENT, difference.text, "kv_identity")
        return Ticket(
            wire_ticket.id,
            wire_ticket.secret,
            start.attempt,
            runtime.incarnation,
            wire_ticket.decode_incarnation,
        )

    def _started(self, attempt: bytes, future: "Future[Any]") -> None:
        sending = self._sending.get(attempt)
        if sending is None:
            return
        error = ""
        try:
            future.result()
        except QueueFull:
            sending.span.event("busy")
            event = wire.PrefillEvent(busy=wire.Busy(attempt=attempt))
        except EngineError as failure:
            error = str(failure)
            event = _failed(attempt, service_error(failure))
        except CancelledError:
            error = "the worker is stopping"
            event = _failed(attempt, ServiceError(pb.UNAVAILABLE, error))
        else:
            accepted = wire.PrefillAccepted(attempt=attempt)
            sending.owner.outbox.put(wire.PrefillEvent(accepted=accepted))
            return
        self._forget(attempt, error)
        sending.owner.outbox.put(event)

    def _span(self, start: wire.PrefillStart, num_tokens: int, now: float) -> TraceSpan:
        parent = TraceContext(start.trace_parent, start.trace_state)
        span = self._tracer.begin("prefill", parent, now)
        if span.recorded:
            span.set(
                pdserve__request=start.request,
                pdserve__attempt=start.attempt.hex(),
                pdserve__prompt_tokens=num_tokens,
            )
        return span

    def _forget(self, attempt: bytes, error: str) -> SendingAttempt:
        """Remove an attempt from the running ones and end its trace span. `error`: why it failed;
        empty if it did not."""
        sending = self._sending.pop(attempt)
        sending.span.end(error)
        if not self._sending:
            self._empty.set()
        return sending


def _end_of(sent: Sent) -> wire.PrefillEvent:
    if sent.reason:
        error = ServiceError(pb.UNAVAILABLE, f"the KV hand-off was lost: {sent.reason}")
        return _failed(sent.attempt, error, handed_back=sent.reason == HANDED_BACK)
    done = wire.PrefillDone(
        attempt=sent.attempt,
        cached_tokens=sent.cached_tokens,
        sent_bytes=sent.num_bytes,
        transport=sent.transport,
        phases=_phases(sent),
    )
    return wire.PrefillEvent(done=done)


def _failed(attempt: bytes, error: ServiceError, handed_back: bool = False) -> wire.PrefillEvent:
    failed = wire.PrefillFailed(
        attempt=attempt, failure=error.to_failure(), handed_back=handed_back
    )
    return wire.PrefillEvent(failed=failed)


def _phases(sent: Sent) -> pb.Phases:
    times = sent.times
    picked = times.picked or times.ended
    computed = min(times.computed or times.ended, times.ended)
    return pb.Phases(
        queue_s=picked - times.started,
        prefill_s=computed - picked,
        transfer_s=max(0.0, (times.completed or times.ended) - computed),
    )


def _add_phases(span: TraceSpan, sent: Sent) -> None:
    if not span.recorded:
        return
    times = sent.times
    span.set(
        pdserve__cached_tokens=sent.cached_tokens,
        pdserve__sent_bytes=sent.num_bytes,
        pdserve__transport=sent.transport,
    )
    ended = times.completed or times.ended
    picked = times.picked or ended
    computed = min(times.computed or ended, ended)
    span.phase("queue", times.started, picked)
    span.phase("compute", picked, computed)
    span.phase("transfer", computed, ended)


def _log(sent: Sent, request: str) -> None:
    phases = _phases(sent)
    outcome = sent.reason or f"{sent.num_bytes / 1e6:.1f} MB by {sent.transport}"
    log.debug(
        "hand-off %s: %s; %d tokens cached; queue %.3f s, prefill %.3f s, transfer %.3f s",
        sent.attempt.hex()[:8],
        outcome,
        sent.cached_tokens,
        phases.queue_s,
        phases.prefill_s,
        phases.transfer_s,
        extra={"request": request},
    )
