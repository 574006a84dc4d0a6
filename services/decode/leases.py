"""Carries out the actions of all attempts' leases (lease_machine.py): parks attempts whose session
is lost, gives them to another session, or aborts them.

Everything runs on the event loop. DecodeCore keeps the attempts that have not ended. An attempt
that ended with an event that a router must not miss (Finished or Failed) is kept here until its
lease ends, so that another router can still receive that event.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pdserve.engine.api import NewTokens, Pooled
from pdserve.protos import worker_pb2 as wire
from pdserve.services.decode.attempt import DecodeSession, ServedAttempt
from pdserve.services.decode.convert import to_embedding, to_prompt_logprobs, to_tokens
from pdserve.services.decode.lease_machine import (
    AttemptEnded,
    BlocksEvicted,
    Event,
    LeaseAction,
    LeasePhase,
    LeaseTick,
    Resumed,
    SessionLost,
    step,
)

log = logging.getLogger(__name__)

MAX_KEPT_WEIGHT = 1 << 20  # token ids in transcripts of ended attempts: some 30 MB
TICK_SLACK_S = 0.005  # a loop's timer may be early by its clock's resolution


@dataclass(slots=True)
class LeaseFigures:
    """Counters of leases: parked, resumed, expired and evicted attempts, and stale messages. The
    event loop writes them; any thread may read them."""

    parked: int = 0
    adopted: int = 0
    expired: int = 0
    evicted: int = 0
    stale: int = 0


class Leases:
    """The leases of all attempts of one decode process. The callback `park` stops an attempt's
    steps or lets them continue; `give_up` ends an attempt in the engine and sends no event to a
    router."""

    def __init__(
        self,
        park: Callable[[ServedAttempt, bool], None],
        give_up: Callable[[ServedAttempt], None],
    ) -> None:
        self.figures = LeaseFigures()
        self._park = park
        self._give_up = give_up
        self._kept: dict[bytes, ServedAttempt] = {}  # the oldest first
        self._kept_weight = 0

    def session_lost(self, session: DecodeSession, live: Iterable[ServedAttempt]) -> None:
        """Park the attempts of a lost router session until another session resumes them, and keep
        the last events of its ended ones longer. `live`: the attempts that have not ended."""
        for served in [*live, *self._kept.values()]:
            if served.resume is not None and served.resume[0] is session:
                served.resume = None
            if served.session is session:
                self._advance(served, SessionLost(served.lease.epoch))

    def resume(
        self, session: DecodeSession, resume: wire.Resume, live: ServedAttempt | None
    ) -> None:
        """Respond to Resume: send Resumed and all events after the counts of ids, or Gone if the
        attempt is unknown or its output cannot be repeated. If the engine has not admitted the
        attempt yet, the response follows the admission. `live`: the attempt if it has not ended."""
        served = live or self._kept.get(resume.attempt)
        if served is not None and not served.admitted:
            if served.resume is not None:
                served.resume[0].outbox.put(_gone(resume.attempt))
            served.resume = (session, resume)
        elif served is None or not served.transcript.covers(resume.counts):
            self.figures.stale += 1
            session.outbox.put(_gone(resume.attempt))
        else:
            self._advance(served, Resumed(resume.epoch), session, resume.counts)

    def admitted(self, served: ServedAttempt) -> None:
        """Record that the engine has admitted the attempt, and respond to a Resume that came
        before."""
        served.admitted = True
        if served.resume is not None:
            (session, resume), served.resume = served.resume, None
            self.resume(session, resume, served)

    def ended(self, served: ServedAttempt, last: wire.DecodeEvent | None) -> None:
        """Record that an attempt has ended and its blocks are free. `last`: its last event if a
        router must not miss it; the event is then kept for other sessions."""
        served.last = last
        self._advance(served, AttemptEnded(keep=last is not None))
        if served.lease.phase is LeasePhase.KEPT:
            self._kept[served.attempt] = served
            self._kept_weight += served.transcript.weight
            while self._kept_weight > MAX_KEPT_WEIGHT:
                self._advance(next(iter(self._kept.values())), BlocksEvicted())

    def cancelled(self, served: ServedAttempt) -> None:
        """Record that an attempt has ended and that no router waits for its last event."""
        self._advance(served, AttemptEnded())

    def forget_kept(self, attempt: bytes) -> None:
        """Drop an ended attempt that was kept, because no router needs its last event any more."""
        if attempt in self._kept:
            self.cancelled(self._kept[attempt])

    def evicted(self, served: ServedAttempt) -> None:
        """Record that the engine has evicted the attempt's blocks for other requests, which ends
        the attempt."""
        self._advance(served, BlocksEvicted())

    # ---

    def _advance(
        self,
        served: ServedAttempt,
        event: Event,
        new_session: DecodeSession | None = None,
        counts: Sequence[int] = (),
    ) -> None:
        old_lease = served.lease
        served.lease, actions = step(old_lease, event, time.monotonic())
        self.figures.parked += served.lease.phase is LeasePhase.PARKED
        self.figures.parked -= old_lease.phase is LeasePhase.PARKED
        for action in actions:
            self._act(served, action, new_session, counts)
        if served.lease.until != old_lease.until and served.lease.until != float("inf"):
            wait_s = served.lease.until - time.monotonic() + TICK_SLACK_S
            asyncio.get_running_loop().call_later(wait_s, self._advance, served, LeaseTick())

    def _act(
        self,
        served: ServedAttempt,
        action: LeaseAction,
        new_session: DecodeSession | None,
        counts: Sequence[int],
    ) -> None:
        match action:
            case LeaseAction.PARK:
                text = "the router's session was lost; the request waits for a router to resume it"
                log.debug(text, extra={"request": served.name})
                self._park(served, True)
            case LeaseAction.UNPARK:
                self._park(served, False)
            case LeaseAction.HAND_OVER:
                assert new_session is not None  # the session that sent Resume
                text = "another session of a router resumed the request"
                log.debug(text, extra={"request": served.name})
                self._hand_over(served, new_session, counts)
            case LeaseAction.GIVE_UP:
                text = "no router resumed the request in time; it is aborted"
                log.debug(text, extra={"request": served.name})
                self._give_up(served)
            case LeaseAction.FORGET:
                if served.resume is not None:
                    served.resume[0].outbox.put(_gone(served.attempt))
                    served.resume = None
                if self._kept.pop(served.attempt, None) is not None:
                    self._kept_weight -= served.transcript.weight
            case LeaseAction.SEND_GONE:
                (new_session or served.session).outbox.put(_gone(served.attempt))
            case LeaseAction.COUNT_STALE:
                self.figures.stale += 1
            case LeaseAction.COUNT_ADOPTED:
                self.figures.adopted += 1
            case LeaseAction.COUNT_EXPIRED:
                self.figures.expired += 1
            case LeaseAction.COUNT_EVICTED:
                self.figures.evicted += 1

    def _hand_over(
        self, served: ServedAttempt, session: DecodeSession, counts: Sequence[int]
    ) -> None:
        served.session, served.epoch = session, served.lease.epoch
        resumed = wire.Resumed(attempt=served.attempt, epoch=served.epoch)
        resumed.follows = served.follows
        if served.lease.live and served.ticket is not None and served.received is None:
            resumed.ticket.CopyFrom(served.ticket)
            resumed.prefill_incarnation = served.prefill_incarnation
        session.outbox.put(wire.DecodeEvent(resumed=resumed))
        for event in _repeated(served, counts):
            session.outbox.put(event)
        if served.last is not None:
            last_event = wire.DecodeEvent()
            last_event.CopyFrom(served.last)
            session.outbox.put(last_event)


def _repeated(served: ServedAttempt, counts: Sequence[int]) -> Iterator[wire.DecodeEvent]:
    for event in served.transcript.since(counts):
        if isinstance(event, NewTokens):
            tokens = to_tokens(served.name, served.attempt, served.epoch, event)
            yield wire.DecodeEvent(tokens=tokens)
        elif isinstance(event, Pooled):
            embedding = to_embedding(served.name, served.attempt, served.epoch, event)
            yield wire.DecodeEvent(embedding=embedding)
        else:
            for part in to_prompt_logprobs(served.name, served.attempt, event.logprobs):
                yield wire.DecodeEvent(prompt_logprobs=part)


def _gone(attempt: bytes) -> wire.DecodeEvent:
    return wire.DecodeEvent(gone=wire.Gone(attempt=attempt))
