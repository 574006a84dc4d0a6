"""Runs the lease of every attempt (engine/handoff/lease.py): parks, hands over, gives up.

Everything runs on the loop. A live attempt is the core's; one that has ended with last words is
kept here until its lease ends, so that a router that comes for them finds them.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.engine.api.request import NewTokens
from pdserve.engine.handoff.lease import (
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
from pdserve.protos import worker_pb2 as wire
from pdserve.services.decode.convert import to_prompt_logprobs, to_tokens
from pdserve.services.decode.served import DecodeSession, Served

log = logging.getLogger(__name__)

MAX_KEPT_WEIGHT = 1 << 20  # token ids in transcripts of ended attempts: some 30 MB
TICK_SLACK_S = 0.005  # a loop's timer may be early by its clock's resolution


@dataclass(slots=True)
class LeaseFigures:
    """Written on the loop; any thread may read them."""

    parked: int = 0
    adopted: int = 0
    expired: int = 0
    evicted: int = 0
    stale: int = 0


class Tenants(Protocol):
    """The engine's side of leases."""

    def park(self, served: Served, parked: bool) -> None:
        """No steps, or steps again."""

    def give_up(self, served: Served) -> None:
        """End it in the engine; nobody is told."""


class Leases:
    """The leases of one decode process."""

    def __init__(self, tenants: Tenants) -> None:
        self.figures = LeaseFigures()
        self._tenants = tenants
        self._kept: dict[bytes, Served] = {}  # the oldest first
        self._kept_weight = 0

    def session_lost(self, session: DecodeSession, live: Iterable[Served]) -> None:
        """Its attempts wait for another session from now on."""
        for served in [*live, *self._kept.values()]:
            if served.asked is not None and served.asked[0] is session:
                served.asked = None
            if served.session is session:
                self._advance(served, SessionLost(served.lease.epoch))

    def resume(self, session: DecodeSession, resume: wire.Resume, live: Served | None) -> None:
        """Answered with Resumed and what comes after the counts, or with Gone; of an attempt that
        the engine has yet to admit, once it has."""
        served = live or self._kept.get(resume.attempt)
        if served is not None and not served.admitted:
            if served.asked is not None:
                served.asked[0].outbox.put(_gone(resume.attempt))
            served.asked = (session, resume)
        elif served is None or not served.transcript.covers(resume.counts):
            self.figures.stale += 1
            session.outbox.put(_gone(resume.attempt))
        else:
            self._advance(served, Resumed(resume.epoch), session, resume.counts)

    def admitted(self, served: Served) -> None:
        """The engine has it: whoever asked meanwhile is answered."""
        served.admitted = True
        if served.asked is not None:
            (session, resume), served.asked = served.asked, None
            self.resume(session, resume, served)

    def ended(self, served: Served, last: wire.DecodeEvent | None) -> None:
        """It is over, and its blocks are free; `last`: words that a router must not miss."""
        served.last = last
        self._advance(served, AttemptEnded(keep=last is not None))
        if served.lease.phase is LeasePhase.KEPT:
            self._kept[served.attempt] = served
            self._kept_weight += served.transcript.weight
            while self._kept_weight > MAX_KEPT_WEIGHT:
                self._advance(next(iter(self._kept.values())), BlocksEvicted())

    def cancelled(self, served: Served) -> None:
        """It is over, and nobody waits for its last words."""
        self._advance(served, AttemptEnded())

    def forget_kept(self, attempt: bytes) -> None:
        """Nobody waits for the last words of this attempt."""
        if attempt in self._kept:
            self.cancelled(self._kept[attempt])

    def evicted(self, served: Served) -> None:
        """The engine gave its blocks to others."""
        self._advance(served, BlocksEvicted())

    # ---

    def _advance(
        self,
        served: Served,
        event: Event,
        asker: DecodeSession | None = None,
        counts: Sequence[int] = (),
    ) -> None:
        before = served.lease
        served.lease, actions = step(before, event, time.monotonic())
        self.figures.parked += served.lease.phase is LeasePhase.PARKED
        self.figures.parked -= before.phase is LeasePhase.PARKED
        for action in actions:
            self._act(served, action, asker, counts)
        if served.lease.until != before.until and served.lease.until != float("inf"):
            wait_s = served.lease.until - time.monotonic() + TICK_SLACK_S
            asyncio.get_running_loop().call_later(wait_s, self._advance, served, LeaseTick())

    def _act(
        self,
        served: Served,
        action: LeaseAction,
        asker: DecodeSession | None,
        counts: Sequence[int],
    ) -> None:
        match action:
            case LeaseAction.PARK:
                log.info("its session is lost: parked", extra={"request": served.name})
                self._tenants.park(served, True)
            case LeaseAction.UNPARK:
                self._tenants.park(served, False)
            case LeaseAction.HAND_OVER:
                assert asker is not None  # who asks for it
                log.info("handed over", extra={"request": served.name})
                self._hand_over(served, asker, counts)
            case LeaseAction.GIVE_UP:
                log.info("nobody came for it: given up", extra={"request": served.name})
                self._tenants.give_up(served)
            case LeaseAction.FORGET:
                if served.asked is not None:
                    served.asked[0].outbox.put(_gone(served.attempt))
                    served.asked = None
                if self._kept.pop(served.attempt, None) is not None:
                    self._kept_weight -= served.transcript.weight
            case LeaseAction.SEND_GONE:
                (asker or served.session).outbox.put(_gone(served.attempt))
            case LeaseAction.COUNT_STALE:
                self.figures.stale += 1
            case LeaseAction.COUNT_ADOPTED:
                self.figures.adopted += 1
            case LeaseAction.COUNT_EXPIRED:
                self.figures.expired += 1
            case LeaseAction.COUNT_EVICTED:
                self.figures.evicted += 1

    def _hand_over(self, served: Served, session: DecodeSession, counts: Sequence[int]) -> None:
        served.session, served.epoch = session, served.lease.epoch
        resumed = wire.Resumed(attempt=served.attempt, epoch=served.epoch)
        resumed.follows = served.follows
        if served.lease.live and served.ticket is not None and served.received is None:
            resumed.ticket.CopyFrom(served.ticket)
            resumed.prefill_boot = served.prefill_boot
        session.outbox.put(wire.DecodeEvent(resumed=resumed))
        for event in _said_again(served, counts):
            session.outbox.put(event)
        if served.last is not None:
            again = wire.DecodeEvent()
            again.CopyFrom(served.last)
            session.outbox.put(again)


def _said_again(served: Served, counts: Sequence[int]) -> Iterator[wire.DecodeEvent]:
    for event in served.transcript.since(counts):
        if isinstance(event, NewTokens):
            tokens = to_tokens(served.name, served.attempt, served.epoch, event)
            yield wire.DecodeEvent(tokens=tokens)
        else:
            for part in to_prompt_logprobs(served.name, served.attempt, event.logprobs):
                yield wire.DecodeEvent(prompt_logprobs=part)


def _gone(attempt: bytes) -> wire.DecodeEvent:
    return wire.DecodeEvent(gone=wire.Gone(attempt=attempt))
