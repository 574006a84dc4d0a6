"""Pure state machine of one request in the router; time is an argument.

    QUEUED --AttemptBegun--> ADMITTING --AdmitAccepted, ticket--> PREFILLING --output--> RUNNING
      ^  ^                      |  |                                  |                      |
      |  +---- AdmitRefused ----+  +--AdmitAccepted, no ticket--------|----------------> RUNNING
      |                                                               |                      |
      +-- a lost attempt: PrefillEnded, KvLost, AttemptUnknown, a dead worker, WaitFailed ---+
      |
      |   SEEKING --its worker can be reached--> RESUMING --ResumeAccepted--> RUNNING
      |      |                                      |            +--ticket--> PREFILLING
      +------+-- not in time -----------------------+-- AttemptUnknown, no answer, a dead worker

    PREFILLING, RUNNING, RESUMING --the session with decode is lost, decode lives--> SEEKING
    any --AttemptFinished | AttemptFailed | a cancel | a deadline | Reissued--> ENDED

A Start that names an attempt (its gateway lost a router, or its session with this one) begins in
SEEKING, because decode keeps an attempt for a while after its session is lost. Once the decode
worker can be reached, the router sends Resume (RESUMING), so that nothing is computed twice. If the
response carries a ticket, decode still awaits the KV, and the router repeats PrefillStart.

A migration to another decode worker with the KV is a sub-state (migration_machine.py) of RUNNING
or, if the session with the source is lost meanwhile, of SEEKING and RESUMING.

Invariants: one terminal action (SendFinished or SendFailed; none after Reissued) accompanies the
transition into ENDED, and no event leaves ENDED. The output of only one attempt counts at a time:
during a migration that of the attempt at the source, until the single switch to the one at the
target. Every other attempt is closed, and cancelled on each worker that may still run it. Each
attempt counts towards MAX_ATTEMPTS unless decode refused it. Only this module writes the stage.
"""

from dataclasses import replace
from typing import Any

from pdserve.services.router.request import actions as do
from pdserve.services.router.request import events as on
from pdserve.services.router.request import migration_machine
from pdserve.services.router.request.actions import FailureReason
from pdserve.services.router.request.events import Reachability
from pdserve.services.router.request.migration_machine import MigrationOutcome
from pdserve.services.router.request.state import (
    MAX_SESSIONS,
    MIGRATION_PAUSE_S,
    Attempt,
    Migration,
    Routing,
    Stage,
)

MAX_ATTEMPTS = 12  # bounds a request that keeps breaking sessions
MAX_CRASHES = 2  # deaths of decode workers that ran a request; then it fails
ANSWER_S = 10.0  # for the answer to an Admit, a Resume or a PrefillStart
ORPHAN_S = 5.0  # a lost gateway may come back and issue the request again
OVERDUE_S = 2.0  # past its deadline, at which workers end a request, the router ends it
SEEK_S = 5.0  # for the worker to join a router that has just started, or to reconnect
SENDER_S = 1.5  # after a source's death: decode finds a silent sender in 1 s


def step(
    state: Routing, event: on.RoutingEvent, now: float
) -> tuple[Routing, tuple[do.RoutingAction, ...]]:
    """Apply an event to the state of a request. Returns the next state and the actions to carry
    out. Accepts any event in any state; an ended request ignores all events."""
    if state.stage is Stage.ENDED:
        return state, ()
    transition = _Step(state, now)
    match event:
        case on.Submitted():
            transition.submitted(event)
        case on.AttemptBegun():
            transition.begin(event)
        case on.Queued():
            transition.set(refused=frozenset())
        case on.Reissued():
            transition.reissued(event.same_progress)
        case on.RequestCancelled():
            transition.fail(FailureReason.CANCELLED)
        case on.ChoicesCancelled():
            transition.cancel_choices(event)
        case on.ClientLeft():
            transition.set(orphan_since=now if state.orphan_since is None else state.orphan_since)
        case on.RequestRefused():
            transition.fail(event.error)
        case on.TimePassed():
            transition.tick(event)
        case on.WorkerLost():
            transition.step_migration(event)
            transition.worker_lost(event)
        case on.MigrationBegun():
            transition.migrate(event.target)
        case on.PrefillEvent():
            if state.attempt is not None and state.attempt.id == event.attempt:
                transition.of_prefill(event)
        case on.DecodeEvent():
            if not transition.take_for_migration(event):
                transition.of_decode(event)
    return transition.state, tuple(transition.actions)


class _Step:
    """One step of the state machine while it is computed: the state and the actions so far."""

    def __init__(self, state: Routing, now: float) -> None:
        self.state = state
        self.now = now
        self.actions: list[do.RoutingAction] = []

    def set(self, **changes: Any) -> None:
        if any(getattr(self.state, name) != value for name, value in changes.items()):
            self.state = replace(self.state, **changes)

    def set_attempt(self, **changes: Any) -> None:
        attempt = self.state.attempt
        if attempt and any(getattr(attempt, name) != value for name, value in changes.items()):
            self.state = replace(self.state, attempt=replace(attempt, **changes))

    def act(self, *actions: do.RoutingAction) -> None:
        self.actions += actions

    # --- tries

    def submitted(self, event: on.Submitted) -> None:
        if event.decode is None:
            self.act(do.Place())
        else:
            self.seek(event.decode)

    def begin(self, event: on.AttemptBegun) -> None:
        """Begin an attempt on the chosen workers: open it, announce its placement, and send Admit
        to decode. Ignored unless the request is queued."""
        if self.state.stage is not Stage.QUEUED:
            return
        attempt = Attempt(
            event.attempt, event.decode, event.prefill, self.now, follows=event.follows
        )
        self.set(stage=Stage.ADMITTING, attempt=attempt, num_attempts=self.state.num_attempts + 1)
        self.act(
            do.OpenAttempt(attempt.id, attempt.decode, attempt.prefill, follows=attempt.follows)
        )
        self.place_at(attempt)  # before Admit, so that the worker's results can be found again
        self.act(do.SendAdmit(attempt.id, attempt.prefill, event.min_shared_tokens))

    def place_at(self, attempt: Attempt) -> None:
        self.set(placed_attempt=attempt.id, placed_decode=attempt.decode)
        self.act(do.AnnouncePlacement(attempt.id))

    def admitted(self, attempt: Attempt, event: on.AdmitAccepted) -> None:
        """Process that decode has accepted the attempt: enter PREFILLING and start the prefill if
        decode waits for KV of the prefill worker, otherwise enter RUNNING."""
        if self.state.stage is not Stage.ADMITTING:
            return
        self.set(refused=frozenset())
        self.set_attempt(follows=event.follows)
        if attempt.prefill and event.ticket:
            self.set(stage=Stage.PREFILLING)
            self.set_attempt(ticket=True)
            self.start_prefill(attempt.prefill)
            return
        if attempt.prefill:
            self.act(do.ReleasePrefill(attempt.id))
            self.set_attempt(prefill=b"")
        self.set(stage=Stage.RUNNING)

    def start_prefill(self, prefill: bytes) -> None:
        self.set_attempt(prefill=prefill, command_sent=self.now, unheard=False)
        assert self.state.attempt is not None
        self.act(do.SendPrefillStart(self.state.attempt.id, prefill))

    def busy(self) -> None:
        """Try another decode worker, or queue the request, after one had no room or did not answer
        Admit."""
        attempt = self.state.attempt
        if attempt is not None and self.state.stage is Stage.ADMITTING:
            self.set(refused=self.state.refused | {attempt.decode})
            self.not_tried("busy")

    def not_tried(self, reason: str) -> None:
        """Close an attempt that ended on every worker before any work began, and place the request
        again. The attempt does not count towards MAX_ATTEMPTS."""
        # An adopted attempt was not counted.
        self.set(num_attempts=max(0, self.state.num_attempts - 1))
        self.close(reason)
        if self.state.complete:  # its choices were cancelled meanwhile
            self.finish_here()
        else:
            self.act(do.Place())

    def retry(self, reason: str) -> None:
        """Give up a lost attempt: cancel it where it may still run, and place the request again
        with the ids received so far. Ends the request instead if all choices have ended, or if it
        has reached MAX_CRASHES or MAX_ATTEMPTS."""
        self.act(do.LogLoss(reason))
        if self.state.queue_deadline is not None:  # it had its turn, so its wait starts again
            self.set(queue_deadline=self.now + self.state.queue_s)
        self.cancel_attempt()
        self.close(reason)
        if self.state.complete:  # only the worker's Finished was missing
            self.finish_here()
        elif self.state.crash_count >= MAX_CRASHES:
            self.fail(FailureReason.POISON)
        elif self.state.num_attempts >= MAX_ATTEMPTS:
            self.fail(FailureReason.NO_ATTEMPT_LEFT)
        else:
            self.act(do.Place())

    def cancel_attempt(self) -> None:
        """Cancel the current attempt at each worker that may still run it."""
        attempt = self.state.attempt
        if attempt is None:
            return
        if not attempt.decode_over:
            self.act(do.CancelAtDecode(attempt.id))
        started = self.state.stage is not Stage.ADMITTING
        if attempt.prefill and started and not attempt.prefill_over:
            self.act(do.CancelAtPrefill(attempt.id))

    def close(self, lost: str = "") -> None:
        attempt = self.state.attempt
        self.set(stage=Stage.QUEUED, attempt=None)
        if attempt is not None:
            self.act(do.CloseAttempt(attempt.id, lost))
            self.drop_migration("the attempt at the source ended")

    def prefill_lost(self, reason: str, at_fault: bool = True) -> None:
        """Retry the request after a failure of the prefill worker or of the hand-off; no effect
        once the KV is known to be complete. `at_fault`: whether to count a prefill failure."""
        attempt = self.state.attempt
        if attempt is None or not attempt.prefill or attempt.filled:
            return
        self.set(
            failed_prefills=self.state.failed_prefills | {attempt.prefill},
            num_prefill_failures=self.state.num_prefill_failures + at_fault,
        )
        self.retry(f"prefill: {reason}")

    # --- ends

    def finish_here(self) -> None:
        """Finish a request all of whose choices have ended, without waiting for a worker's
        report."""
        self.act(do.SendFinished())
        self.set(stage=Stage.ENDED)

    def fail(self, error: FailureReason | Exception) -> None:
        self.cancel_attempt()
        attempt = self.state.attempt
        self.act(do.SendFailed(error, attempt.id if attempt is not None else b""))
        self.close()
        self.set(stage=Stage.ENDED)

    def reissued(self, same_progress: bool) -> None:
        """End this issue of the request without an event, since the client issued the request
        again. An attempt that decode has admitted keeps running, and the new issue finds it by its
        placement. If decode has yet to answer the Admit and the new issue holds the same ids, the
        new issue takes the attempt over. Otherwise the attempt is cancelled."""
        attempt = self.state.attempt
        admitting = self.state.stage is Stage.ADMITTING
        if attempt is not None and admitting and same_progress:
            self.set(attempt=None)
            self.act(do.HandOver(attempt.id))
        elif attempt is not None and not admitting:
            self.act(do.LeaveToSuccessor())
        else:
            self.cancel_attempt()
        self.close()
        self.set(stage=Stage.ENDED)

    def cancel_choices(self, event: on.ChoicesCancelled) -> None:
        self.set(complete=event.complete)
        if self.state.attempt is not None:  # decode ends them, and reports the end of the last one
            self.act(do.CancelAtDecode(self.state.attempt.id, event.choices))
        elif event.complete:
            self.finish_here()

    def tick(self, event: on.TimePassed) -> None:
        state, attempt, now = self.state, self.state.attempt, self.now
        overdue = OVERDUE_S if attempt is not None else 0.0
        if state.orphan_since is not None and now - state.orphan_since >= ORPHAN_S:
            self.fail(FailureReason.CLIENT_GONE)
        elif state.deadline is not None and now >= state.deadline + overdue:
            self.fail(FailureReason.DEADLINE)
        elif state.stage is Stage.SEEKING:
            self.seek(event.decode)
        elif attempt is None:
            queue_expired = state.queue_deadline is not None and now >= state.queue_deadline
            if queue_expired and not state.begun:
                self.fail(FailureReason.QUEUE_TIMEOUT)
        elif state.stage is Stage.PREFILLING and attempt.prefill_unaware and attempt.ticket:
            self.seek_prefill(event.prefill)
        elif now - attempt.command_sent >= ANSWER_S:
            self.no_answer(attempt)
        self.step_migration(event)
        self.sender_tick()

    def no_answer(self, attempt: Attempt) -> None:
        if self.state.stage is Stage.ADMITTING:
            self.cancel_attempt()
            self.busy()
        elif self.state.stage is Stage.RESUMING:
            self.retry("the decode worker did not respond in time")
        elif self.state.stage is Stage.PREFILLING and not attempt.prefill_started:
            self.prefill_lost("no response in time")

    # --- lost sessions and resumed attempts

    def worker_lost(self, event: on.WorkerLost) -> None:
        attempt = self.state.attempt
        if attempt is None or (not event.crashed and self.seek_again(attempt, event.worker)):
            return
        if attempt.decode == event.worker:
            awaiting_answer = self.state.stage in (Stage.ADMITTING, Stage.RESUMING)
            unknown = awaiting_answer and (attempt.adopted or not attempt.answered)
            if event.crashed and attempt.computing and not unknown:
                self.set(crash_count=self.state.crash_count + 1)
            self.retry(f"decode {event.reason}")
        elif attempt.prefill == event.worker:
            self.prefill_lost(event.reason)

    def seek_again(self, attempt: Attempt, worker: bytes) -> bool:
        """Keep an attempt after the session with a worker that lives has broken, until the session
        returns. Returns False if the attempt cannot continue. Decode keeps an attempt that it has
        admitted, and a prefill worker sends the KV without a session."""
        if attempt.decode == worker and self.state.stage is not Stage.ADMITTING:
            self.set(stage=Stage.SEEKING, seek_start=self.now)
            return self.state.num_sessions + 1 < MAX_SESSIONS
        if attempt.prefill == worker and attempt.ticket:
            self.set_attempt(unheard=True)
            return True
        return False

    def seek(self, decode: Reachability) -> None:
        """Send Resume if the attempt's decode worker can be reached now, wait if it may be soon,
        and retry the request on other workers if it cannot be reached in time."""
        state = self.state
        self.set(stage=Stage.SEEKING)
        if decode is Reachability.YES:
            if state.attempt is None:
                attempt = Attempt(
                    state.placed_attempt,
                    state.placed_decode,
                    command_sent=self.now,
                    answered=True,
                    adopted=True,
                )
                self.set(attempt=attempt)
                self.act(do.OpenAttempt(attempt.id, attempt.decode, adopted=True))
            else:
                self.set(num_sessions=state.num_sessions + 1)
                self.set_attempt(command_sent=self.now)
            self.set(stage=Stage.RESUMING)
            self.act(do.SendResume(state.placed_attempt))
        elif self.now >= state.seek_start + SEEK_S or decode is Reachability.NO:
            self.retry("the decode worker cannot be reached")

    def resumed(self, attempt: Attempt, event: on.ResumeAccepted) -> None:
        """Continue the attempt in this session after decode has accepted Resume; decode then sends
        the output that the client lacks."""
        if self.state.stage is not Stage.RESUMING or event.epoch != self.state.session_epoch:
            return
        self.set(num_resumed=self.state.num_resumed + 1)
        self.act(do.Adopt(attempt.id), do.RepeatAborts(attempt.id))
        self.set_attempt(follows=event.follows)
        if not event.ticket:
            self.set(stage=Stage.RUNNING)
            return
        self.set(stage=Stage.PREFILLING)
        if attempt.adopted:
            self.set_attempt(ticket=True, awaited_prefill=event.prefill)
        if attempt.prefill_unaware:
            self.seek_prefill(event.reachable)

    def seek_prefill(self, prefill: Reachability) -> None:
        """Send PrefillStart again if the attempt's prefill worker can be reached now, wait if it
        may be soon, and retry the request on other workers if it cannot be reached."""
        assert self.state.attempt is not None
        sender = self.state.attempt.sending_prefill  # empty for a migration's target
        if prefill is Reachability.YES and sender:
            self.start_prefill(sender)
        elif prefill is not Reachability.NOT_YET:
            self.set(num_prefill_failures=self.state.num_prefill_failures + 1)
            self.retry("the prefill worker cannot be reached")

    # --- messages of workers about the attempt

    def of_decode(self, event: on.DecodeEvent) -> None:
        attempt = self.state.attempt
        if attempt is None or attempt.id != event.attempt:
            return  # of an attempt that is over
        answers = (
            on.AdmitAccepted
            | on.AdmitRefused
            | on.AttemptFailed
            | on.AttemptUnknown
            | on.ResumeAccepted
        )
        if isinstance(event, answers):
            self.set_attempt(answered=True)
        match event:
            case on.OutputEvent():
                if self.state.takes_output(attempt.id):
                    self.output(event)
            case on.AdmitAccepted():
                self.admitted(attempt, event)
            case on.AdmitRefused():
                self.busy()
            case on.AttemptUnknown():
                self.set_attempt(decode_over=True)
                self.retry("the decode worker does not know the attempt")
            case on.ResumeAccepted():
                self.resumed(attempt, event)
            case on.AttemptFailed():
                self.failed(event)
            case on.KvLost():
                self.set_attempt(decode_over=True)
                if attempt.migrates:
                    self.retry(f"the decode worker lost the KV: {event.reason}")
                else:
                    self.prefill_lost(event.reason)
            case on.WaitEnded():
                self.set_attempt(follows=False)
            case on.WaitFailed():
                self.not_tried(event.reason)

    def output(self, event: on.OutputEvent) -> None:
        match event:
            case on.TokensReceived():
                self.set(stage=Stage.RUNNING, begun=event.begun, complete=event.complete)
                self.set_attempt(produced=True)
                self.act(do.Forward(event.attempt))
            case on.ScoresReceived():
                self.set_attempt(produced=True)
                self.act(do.Forward(event.attempt))
            case on.EmbeddingReceived():  # not streamed: only Finished follows
                self.set(stage=Stage.RUNNING, complete=True)
                self.set_attempt(produced=True)
                self.act(do.Forward(event.attempt))
            case on.OutputMissing():
                if event.tokens:
                    self.set(stage=Stage.RUNNING)
                self.set_attempt(produced=True)
                self.retry(event.reason)
            case on.AttemptFinished():
                self.act(do.SendFinished(event.attempt))
                self.close()
                self.set(stage=Stage.ENDED)

    def failed(self, event: on.AttemptFailed) -> None:
        """End the request with the error of a failed attempt, or try another worker if one may
        still take it."""
        if self.state.stage is Stage.RESUMING:
            return
        self.set_attempt(decode_over=True)
        if event.elsewhere and self.state.stage is Stage.ADMITTING:
            self.busy()
        else:
            self.fail(event.error)

    def of_prefill(self, event: on.PrefillEvent) -> None:
        match event:
            case on.PrefillStarted():
                self.set_attempt(prefill_started=True)
            case on.PrefillSent():
                self.set_attempt(prefill_sent=True, prefill_over=True)
            case on.PrefillEnded():
                self.set_attempt(prefill_over=True)
                self.prefill_lost(event.reason, event.at_fault)

    # --- a migration

    def migrate(self, target: bytes) -> None:
        source = self.state.attempt
        if source is not None and self.state.may_migrate(self.now):
            self.set(migration=Migration(target, self.now))
            self.act(do.SendHold(source.id))

    def take_for_migration(self, event: on.DecodeEvent) -> bool:
        """Apply a decode worker's message to the migration under way. Returns whether the message
        needs no further processing, because it concerns only the migration or an attempt that is
        over."""
        migration, source = self.state.migration, self.state.attempt
        if migration is not None and source is not None and migration.is_target(event.attempt):
            self.advance(migration_machine.of_target(migration, source, event))
            return not isinstance(event, on.OutputEvent)
        if source is None or source.id != event.attempt:
            return True  # it is about an attempt that is over
        self.step_migration(event)
        if self.state.attempt is None or self.state.attempt.id != source.id:
            return True
        if isinstance(event, on.SourceMoved):
            self.set_attempt(decode_over=True)
            self.retry("the request migrated to an attempt that had already ended")
            return True
        return isinstance(event, on.SourceHeld | on.SourceStayed)

    def step_migration(self, event: on.RoutingEvent) -> None:
        migration, source = self.state.migration, self.state.attempt
        if migration is not None and source is not None:
            self.advance(migration_machine.step(migration, source, event, self.now))

    def advance(self, result: migration_machine.MigrationResult) -> None:
        self.set(migration=result.migration)
        self.act(*result.actions)
        if result.source_over:
            self.set_attempt(decode_over=True)
        if result.outcome is MigrationOutcome.COMPLETED:
            self.switch(result.migration)
            if result.sender_died:
                self.set_attempt(sender_died=self.now)
        elif result.outcome is MigrationOutcome.FAILED:
            self.migration_failed(result)

    def switch(self, migration: Migration) -> None:
        """Complete a migration: replace the attempt at the source by the one at the target, whose
        output counts from now on."""
        source, attempt = self.state.attempt, migration.attempt
        assert source is not None
        assert attempt is not None
        self.set(migration=None, num_failed_migrations=0)
        if not source.decode_over:
            self.act(do.CancelAtDecode(source.id))
        self.act(do.CloseAttempt(source.id, "moved"))
        stage = Stage.SEEKING if migration.target_lost else Stage.RUNNING
        self.set(attempt=attempt, stage=stage, seek_start=self.now)
        self.place_at(attempt)
        self.act(do.RepeatAborts(attempt.id))

    def migration_failed(self, result: migration_machine.MigrationResult) -> None:
        """End a failed migration: the request continues at the source, and may not migrate again at
        once."""
        self.set(
            num_failed_migrations=self.state.num_failed_migrations + 1,
            next_migration=self.now + MIGRATION_PAUSE_S,
        )
        self.drop_migration(result.reason)
        if not result.source_knows and self.state.attempt is not None:
            self.act(do.SendStay(self.state.attempt.id))

    def drop_migration(self, reason: str) -> None:
        """Forget the migration under way and cancel its attempt at the target; no effect without a
        migration."""
        migration = self.state.migration
        if migration is None:
            return
        self.set(migration=None)
        if migration.attempt is not None:
            if not migration.attempt.decode_over:
                self.act(do.CancelAtDecode(migration.attempt.id))
            self.act(do.CloseAttempt(migration.attempt.id, reason))

    def sender_tick(self) -> None:
        """Retry the request if the source of its migration died SENDER_S ago and the target has
        produced nothing since, because the target may have received no KV."""
        attempt = self.state.attempt
        if attempt is None or attempt.sender_died is None:
            return
        if attempt.produced:
            self.set_attempt(sender_died=None)
        elif self.now - attempt.sender_died >= SENDER_S:
            self.retry("the decode worker died before it sent the KV")


def taken_over(state: Routing, attempt: Attempt) -> Routing:
    """Return the state of a new issue of a request that takes over an attempt of the previous
    issue, whose Admit decode has yet to answer."""
    return replace(state, attempt=attempt, num_attempts=1, stage=Stage.ADMITTING)
