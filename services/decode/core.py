"""The attempts that a decode worker serves, from Admit to their one terminal event.

Everything runs on the event loop. DecodeRuntime posts commands to the engine thread, which responds
through call_soon_threadsafe. An attempt is removed from this module before its terminal event is
put into the router's outbox, or without an event if a router cancelled it; later engine events
about it are ignored. The attempt's lease decides which router session owns it and what happens when
that session is lost (services/decode/leases.py).
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

from pdserve.engine.api import (
    EngineError,
    Event,
    Evicted,
    Finished,
    NewTokens,
    Pooled,
    PrefillComputed,
    PromptScored,
    QueueFull,
    RequestFailed,
    Scheduled,
    Step,
    prefix_ids,
)
from pdserve.engine.handoff.incoming import Received
from pdserve.engine.handoff.outgoing import Sent
from pdserve.engine.handoff.protocol import ID_BYTES, SECRET_BYTES, Ticket
from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rpc import TokensOutbox
from pdserve.services.common.tracing import NO_TRACER, TraceContext, Tracer
from pdserve.services.decode.attempt import DecodeOutbox, DecodeSession, ServedAttempt, Transcript
from pdserve.services.decode.convert import (
    pools_otherwise,
    to_embedding,
    to_prompt_logprobs,
    to_request,
)
from pdserve.services.decode.lease_machine import Lease, LeasePhase
from pdserve.services.decode.leases import Leases
from pdserve.services.decode.runtime import AdmissionReply, DecodeRuntime
from pdserve.services.decode.single_flight import SharingPolicy
from pdserve.services.worker.core import WorkerCore, service_error, when_done

log = logging.getLogger(__name__)

DECLINED = ("busy", "place_again")  # events after which the router places the request elsewhere


class DecodeCore(WorkerCore[DecodeRuntime, DecodeOutbox]):
    """All attempts that one decode process serves, and the routers' commands about them."""

    def __init__(self, tracer: Tracer = NO_TRACER) -> None:
        super().__init__(lambda: TokensOutbox(wire.DecodeEvent))
        self._tracer = tracer
        self.leases = Leases(self._park, self._give_up)
        self._served: dict[bytes, ServedAttempt] = {}  # by attempt id
        self._by_key: dict[str, ServedAttempt] = {}  # by the engine's key

    @property
    def num_served(self) -> int:
        """Number of attempts that this worker serves and that have not ended."""
        return len(self._served)

    # Sessions and commands of routers

    def _opened(self, session: DecodeSession, hello: wire.SessionHello) -> None:
        super()._opened(session, hello)
        session.outbox.reads_rows = hello.reads_rows

    def _session_lost(self, session: DecodeSession) -> None:
        """Let the attempts of a lost router session wait until another session resumes them."""
        self.leases.session_lost(session, self._served.values())

    def admit(self, session: DecodeSession, admit: wire.Admit, prompt_ids: Sequence[int]) -> None:
        """Start an attempt. Sends the router Admitted, Busy or Failed, at once or when the engine
        has responded."""
        runtime, start = self._runtime, admit.start
        try:
            if runtime is None or self._draining:
                raise ServiceError(pb.UNAVAILABLE, "the decode worker does not accept new requests")
            if len(admit.attempt) != ID_BYTES or admit.attempt in self._served:
                text = f"the attempt id must be new and have {ID_BYTES} bytes"
                raise ServiceError(pb.INVALID_ARGUMENT, text, "attempt")
            request = to_request(admit.attempt.hex(), start, prompt_ids)
        except ServiceError as error:
            self.refuse(session, admit, error)
            return
        if pools_otherwise(start, runtime.hello.card):  # another worker may pool so
            session.outbox.put(wire.DecodeEvent(busy=wire.Busy(attempt=admit.attempt)))
            return
        nothing_to_send = len(prefix_ids(request)) < 2 or request.needs_whole_prompt
        remote = bool(admit.prefill_incarnation) and not nothing_to_send
        local_identity = runtime.engine.kv_identity.digest
        leads = not remote or admit.prefill_identity in (b"", local_identity)
        sharing = SharingPolicy(admit.min_shared_tokens, not remote, leads)
        now = time.monotonic()
        served = ServedAttempt(
            attempt=admit.attempt,
            name=start.request,
            epoch=start.epoch,
            request=request,
            session=session,
            remote=remote,
            arrived=now,
            lease=Lease(start.epoch),
            transcript=Transcript(request),
            span=self._tracer.begin(
                "decode", TraceContext(start.trace_parent, start.trace_state), now
            ),
            prefill_incarnation=admit.prefill_incarnation,
        )
        self._served[served.attempt] = served
        self._by_key[request.key] = served
        self._empty.clear()
        self._set_timers(served, start)
        if remote:
            deadline = now + start.remaining_ms / 1000 if start.remaining_ms else float("inf")
            future = runtime.admit_remote(
                served.attempt, request, admit.prefill_incarnation, deadline, sharing
            )
        else:
            future = runtime.admit_local(served.attempt, request, sharing)
        when_done(future, partial(self._admitted, served))

    def refuse(self, session: DecodeSession, admit: wire.Admit, error: ServiceError) -> None:
        """Send the router Failed for an Admit that does not start an attempt."""
        failed = _failed(admit.start.request, admit.attempt, admit.start.epoch, error)
        session.outbox.put(wire.DecodeEvent(failed=failed))

    def cancel(self, session: DecodeSession, attempt: bytes, choices: Sequence[int]) -> None:
        """End an attempt without an event, or only some of its choices, which finish as ABORTED.

        If another session owns the attempt, the cancel is counted and otherwise ignored. Any
        session may cancel a parked attempt, because no session owns it.
        """
        served = self._served.get(attempt)
        if served is None or self._runtime is None:
            self.num_stale += 1
            self.leases.forget_kept(attempt)
            return
        if served.session is not session and served.lease.phase is LeasePhase.OWNED:
            self.num_stale += 1
            return
        if not choices:
            self._forget(served, "cancelled")
            self.leases.cancelled(served)
        self._runtime.cancel(attempt, choices)

    def resume(self, session: DecodeSession, resume: wire.Resume) -> None:
        """Give an attempt to the session that sent Resume. Sends Resumed and the events that the
        router lacks, or Gone if the attempt cannot be resumed."""
        if self._runtime is not None:
            self._runtime.unfreeze(resume.attempt)  # a migration's session no longer owns it
        self.leases.resume(session, resume, self._served.get(resume.attempt))

    def freeze(self, session: DecodeSession, attempt: bytes) -> None:
        """Stop an attempt's steps before a migration. Sends Held after the events of all tokens
        that the attempt has generated, or Stayed if it cannot migrate."""
        served = self._owned(session, attempt)
        if served is None or self._runtime is None:
            session.outbox.put(_stayed(attempt, "the attempt does not run on this worker"))
            return

        def frozen(future: "Future[Any]") -> None:
            held = None if future.cancelled() else future.result()
            if self._served.get(attempt) is not served:
                return  # it has ended meanwhile
            if held is None:
                session.outbox.put(_stayed(attempt, "the request cannot migrate now"))
                return
            so_far = served.finished(held.cached_tokens)
            held_event = wire.Held(attempt=attempt, tokens=held.num_tokens, so_far=so_far)
            session.outbox.put(wire.DecodeEvent(held=held_event))

        when_done(self._runtime.freeze(attempt), frozen)

    def migrate(self, session: DecodeSession, move: wire.Move) -> None:
        """Send a frozen attempt's KV to the decode worker that the command `move` names. Sends
        Moved or Stayed when the hand-off is over."""
        runtime, ticket = self._runtime, move.ticket
        sizes = (len(move.to), len(ticket.id), len(ticket.decode_incarnation), len(ticket.secret))
        if sizes != (ID_BYTES, ID_BYTES, ID_BYTES, SECRET_BYTES):
            session.outbox.put(_stayed(move.attempt, "the ticket is malformed"))
            return
        if runtime is None or self._owned(session, move.attempt) is None:
            session.outbox.put(_stayed(move.attempt, "the attempt does not run on this worker"))
            return

        def began(future: "Future[Any]") -> None:
            if not future.cancelled() and not future.result():
                session.outbox.put(
                    _stayed(move.attempt, "the request was not frozen for a migration")
                )

        target = Ticket(
            ticket.id, ticket.secret, move.to, runtime.incarnation, ticket.decode_incarnation
        )
        identity = move.kv_identity.digest
        when_done(runtime.migrate(move.attempt, target, ticket.data_address, identity), began)

    def unfreeze(self, session: DecodeSession, attempt: bytes) -> None:
        """Let a frozen attempt continue on this worker; sends no event."""
        if self._owned(session, attempt) is not None and self._runtime is not None:
            self._runtime.unfreeze(attempt)

    def _owned(self, session: DecodeSession, attempt: bytes) -> ServedAttempt | None:
        """Return the attempt with this id if it has not ended and the session owns it, otherwise
        None."""
        served = self._served.get(attempt)
        return served if served is not None and served.session is session else None

    # For the leases

    def _park(self, served: ServedAttempt, parked: bool) -> None:
        if self._runtime is not None:
            self._runtime.park(served.attempt, parked)

    def _give_up(self, served: ServedAttempt) -> None:
        self._forget(served, "abandoned")
        if self._runtime is not None:
            self._runtime.cancel(served.attempt)

    # DecodeCallbacks of the engine thread, run on the loop

    def on_step(self, step: Step, now: float) -> None:
        for event in step.events:
            served = self._by_key.get(event.key)
            if served is not None:
                self._on_event(served, event, now)

    def on_received(self, received: Received) -> None:
        served = self._served.get(received.attempt)
        if served is not None:
            served.received = received

    def on_verified(self, attempt: bytes, tokens: int, cached_tokens: int) -> None:
        served = self._served.get(attempt)
        if served is not None:
            verified = wire.Verified(attempt=attempt, tokens=tokens, cached_tokens=cached_tokens)
            served.session.outbox.put(wire.DecodeEvent(verified=verified))

    def on_attached(self, attempt: bytes) -> None:
        """Send Attached: the KV of another attempt, for which this attempt waited, has arrived, and
        the engine has the request."""
        served = self._served.get(attempt)
        if served is not None:
            served.follows = False
            attached = wire.Attached(attempt=attempt)
            served.session.outbox.put(wire.DecodeEvent(attached=attached))

    def on_place_again(self, attempt: bytes, tokens: int, reason: str) -> None:
        """End an attempt with PlaceAgain: it cannot share the KV of another attempt for which it
        waited, or the rest of its prompt is long enough for a prefill worker. It holds no
        blocks."""
        served = self._served.get(attempt)
        if served is not None:
            place_again = wire.PlaceAgain(attempt=attempt, tokens=tokens, reason=reason)
            self._end(served, wire.DecodeEvent(place_again=place_again))

    def on_lost(self, attempt: bytes, reason: str) -> None:
        served = self._served.get(attempt)
        if served is None:
            return
        log.debug(
            "the KV hand-off to this worker was lost, so the router retries the request: %s",
            reason,
            extra={"request": served.name},
        )
        handoff_lost = wire.HandoffLost(attempt=attempt, reason=reason)
        self._end(served, wire.DecodeEvent(handoff_lost=handoff_lost))

    def on_migration_ended(self, attempt: bytes, sent: Sent) -> None:
        """Process the end of a migration's hand-off: send Moved if the target has the request, or
        Stayed if the request continues here."""
        served = self._served.get(attempt)
        if served is None:
            return
        if sent.reason:
            log.debug(
                "the request could not migrate to another decode worker and continues here: %s",
                sent.reason,
                extra={"request": served.name},
            )
            served.session.outbox.put(_stayed(attempt, sent.reason))
            return
        self._forget(served, "")
        self.leases.cancelled(served)
        text = "the request migrated to another decode worker with %.1f MB of KV"
        log.debug(text, sent.num_bytes / 1e6, extra={"request": served.name})
        moved = wire.Moved(attempt=attempt, to=sent.attempt, sent_bytes=sent.num_bytes)
        served.session.outbox.put(wire.DecodeEvent(moved=moved))

    # ---

    def _on_event(self, served: ServedAttempt, event: Event, now: float) -> None:
        match event:
            case NewTokens():  # first, since most events are these
                served.first_token = served.first_token or now
                served.num_generated += len(event.ids)
                served.transcript.take(event)
                served.send(event)
            case Scheduled():
                served.scheduled = served.scheduled or now
            case PrefillComputed(_, _, done):
                # After a preemption the engine computes the same prompt again.
                if done and not served.first_token:
                    served.computed = now
            case PromptScored(_, logprobs):
                served.transcript.take(event)
                for part in to_prompt_logprobs(served.name, served.attempt, logprobs):
                    served.session.outbox.put(wire.DecodeEvent(prompt_logprobs=part))
            case Pooled():
                served.first_token = now
                served.transcript.take(event)
                embedding = to_embedding(served.name, served.attempt, served.epoch, event)
                served.session.outbox.put(wire.DecodeEvent(embedding=embedding))
            case Finished(_, cached_tokens):
                finished = served.finished(cached_tokens)
                log.debug("%s", served.log_line(finished), extra={"request": served.name})
                self._end(served, wire.DecodeEvent(finished=finished))
            case Evicted():
                self._forget(served, "evicted")
                self.leases.evicted(served)
            case RequestFailed(_, message, param) if param:
                self._fail(served, ServiceError(pb.INVALID_ARGUMENT, message, param))
            case RequestFailed(_, message, _, True):
                log.warning("%s", message, extra={"request": served.name})
                text = f"{message}; try again later"
                self._fail(served, ServiceError(pb.UNAVAILABLE, text, retry_after_s=1.0))
            case RequestFailed(_, message):
                log.error(
                    "the engine failed, so the request ends with an internal error: %s",
                    message,
                    extra={"request": served.name},
                )
                text = "the model failed while it processed the request"
                self._fail(served, ServiceError(pb.INTERNAL, text))

    def _admitted(self, served: ServedAttempt, future: "Future[Any]") -> None:
        """Process the engine's response to an Admit: send the router Admitted, Busy or Failed."""
        if self._served.get(served.attempt) is not served:
            return  # cancelled meanwhile; the engine cancels it after the admission
        try:
            admission: AdmissionReply | None = future.result()
        except QueueFull:
            self._busy(served)
            return
        except EngineError as error:
            self._fail(served, service_error(error))
            return
        except CancelledError:
            self._fail(served, ServiceError(pb.UNAVAILABLE, "the worker is stopping"))
            return
        if admission is None:
            self._busy(served)
            return
        ticket, served.follows = admission.ticket, admission.follows
        served.remote = ticket is not None
        admitted = wire.Admitted(
            attempt=served.attempt,
            follows=served.follows,
        )
        if ticket is not None and self._runtime is not None:
            admitted.ticket.CopyFrom(
                wire.Ticket(
                    id=ticket.id,
                    secret=ticket.secret,
                    data_address=self._runtime.data_address,
                    decode_incarnation=ticket.decode_incarnation,
                )
            )
            served.ticket = admitted.ticket
        served.session.outbox.put(wire.DecodeEvent(admitted=admitted))
        self.leases.admitted(served)

    def _busy(self, served: ServedAttempt) -> None:
        self._end(served, wire.DecodeEvent(busy=wire.Busy(attempt=served.attempt)))

    def _set_timers(self, served: ServedAttempt, start: pb.Start) -> None:
        loop = asyncio.get_running_loop()
        if start.remaining_ms:
            served.timers.append(loop.call_later(start.remaining_ms / 1000, self._deadline, served))
        if start.queue_remaining_ms:
            served.timers.append(
                loop.call_later(start.queue_remaining_ms / 1000, self._queue_timeout, served)
            )

    def _deadline(self, served: ServedAttempt) -> None:
        self._abort(served, pb.DEADLINE_EXCEEDED, "the request ran longer than its timeout")

    def _queue_timeout(self, served: ServedAttempt) -> None:
        if served.scheduled or self._runtime is None:
            return
        if not served.remote and not served.follows:
            self._queued_too_long(served)
            return

        def answered(future: "Future[Any]") -> None:
            if not future.cancelled() and future.result():
                self._queued_too_long(served)

        when_done(self._runtime.is_waiting(served.attempt), answered)

    def _queued_too_long(self, served: ServedAttempt) -> None:
        self._abort(
            served,
            pb.QUEUE_TIMEOUT,
            "the request waited in the queue longer than its queue timeout",
        )

    def _abort(self, served: ServedAttempt, code: pb.ErrorCode, message: str) -> None:
        if self._served.get(served.attempt) is served and self._runtime is not None:
            self._fail(served, ServiceError(code, message, retry_after_s=1.0))
            self._runtime.cancel(served.attempt)

    def _fail(self, served: ServedAttempt, error: ServiceError) -> None:
        failed = _failed(served.name, served.attempt, served.epoch, error)
        self._end(served, wire.DecodeEvent(failed=failed))

    def _end(self, served: ServedAttempt, event: wire.DecodeEvent) -> None:
        kind = event.WhichOneof("event") or ""
        name = kind.replace("_", " ")
        if kind in DECLINED:
            served.span.event(name)
        self._forget(served, "" if kind in ("finished", *DECLINED) else name)
        must_deliver = served.admitted and kind in ("finished", "failed")
        self.leases.ended(served, event if must_deliver else None)
        served.session.outbox.put(event)

    def _forget(self, served: ServedAttempt, error: str) -> None:
        """Remove an attempt, and end its timers and its trace span. `error`: why it did not finish
        on this worker, or empty."""
        served.stop_timers()
        served.end_span(error, time.monotonic())
        self._served.pop(served.attempt, None)
        self._by_key.pop(served.request.key, None)
        if not self._served:
            self._empty.set()


def _stayed(attempt: bytes, reason: str) -> wire.DecodeEvent:
    return wire.DecodeEvent(stayed=wire.Stayed(attempt=attempt, reason=reason))


def _failed(request: str, attempt: bytes, epoch: int, error: ServiceError) -> pb.Failed:
    return pb.Failed(request=request, attempt=attempt, epoch=epoch, failure=error.to_failure())
