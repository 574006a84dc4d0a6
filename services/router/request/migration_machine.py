"""Pure state machine of a migration: a running request moves to another decode worker with its KV.

    HOLDING ---SourceHeld---> ADMITTING ---AdmitAccepted---> SENDING ---SourceMoved---> COMPLETED
       |                          |                             |  (or the target's first output,
       |                          |                             |  or the source is lost: then the
       |                          |                             |  target has all or reports KvLost)
       +--------------------------+-----------------------------+
                                  |  SourceStayed, the target refuses, fails or is lost,
                                  v  no outcome within MIGRATION_S
                               FAILED

The source freezes the request and sends its last ids to the router. The target admits the request
with all ids, as after a lost worker, but the source sends the KV. So nothing is computed again, and
the source makes no step between its last id and the KV that it sends.

A migration is a sub-state of a request; machine.py acts on its outcome. Source and target each end
their part when the other is lost, and their messages after the outcome are ignored.
"""

from dataclasses import dataclass, replace
from enum import Enum

from pdserve.services.router.request import actions as do
from pdserve.services.router.request import events as on
from pdserve.services.router.request.state import Attempt, Migration, MigrationStep

MIGRATION_S = 3.0  # from Hold to the outcome; a source aborts the hand-off itself after 2 s


class MigrationOutcome(Enum):
    """Whether a migration is under way or over, and at which worker the request continues."""

    UNDER_WAY = "under way"
    FAILED = "failed"  # it continues at the source
    COMPLETED = "completed"  # it continues at the target


@dataclass(frozen=True, slots=True)
class MigrationResult:
    """Result of applying one event to a migration: its next state, its outcome, and actions."""

    migration: Migration
    outcome: MigrationOutcome = MigrationOutcome.UNDER_WAY
    reason: str = ""
    source_over: bool = False  # nothing to cancel at the source
    source_knows: bool = False  # the source knows that the request stays
    sender_died: bool = False  # the target may have received nothing from the source
    actions: tuple[do.RoutingAction, ...] = ()


def step(
    migration: Migration, source: Attempt, event: on.RoutingEvent, now: float
) -> MigrationResult:
    """Apply an event of the request to its migration; most events change nothing. `source`: the
    attempt at the worker that the request migrates from."""
    target = migration.attempt
    sending = migration.step is MigrationStep.SENDING
    match event:
        case on.TimePassed() if now - migration.began >= MIGRATION_S:
            return _failed(migration, "no response in time")
        case on.WorkerLost():
            return _worker_lost(migration, source, event)
        case on.SourceHeld() if event.attempt == source.id:
            return _held(migration, source, event, now)
        case on.SourceStayed() if event.attempt == source.id:
            return _failed(migration, event.reason, source_knows=True)
        case on.ResumeAccepted() if event.attempt == source.id:  # a new session: it runs there
            return _failed(migration, "the source was resumed", source_knows=True)
        case on.AttemptUnknown() if event.attempt == source.id and sending:
            return _completed(migration, source_over=True)
        case on.SourceMoved() if target is not None and event.to == target.id:
            return _completed(migration, source_over=True)
    return MigrationResult(migration)


def of_target(migration: Migration, source: Attempt, event: on.DecodeEvent) -> MigrationResult:
    """Apply a message of the target about its attempt to the migration. The target's first output
    completes the migration. `source`: the attempt at the worker that the request migrates from."""
    attempt = migration.attempt
    assert attempt is not None
    if not attempt.answered:
        attempt = replace(attempt, answered=True)
        migration = replace(migration, attempt=attempt)
    refusal = ""
    match event:
        case on.AdmitAccepted() if event.ticket and migration.step is MigrationStep.ADMITTING:
            migration = replace(migration, step=MigrationStep.SENDING)
            return MigrationResult(migration, actions=(do.SendMove(source.id, attempt.id),))
        case on.AdmitAccepted() if not event.ticket:
            return _failed(migration, "target: no ticket for the KV")
        case on.AdmitRefused():
            refusal = "busy"
        case on.AttemptFailed():
            refusal = "failed"
        case on.AttemptUnknown():
            refusal = "gone"
        case on.KvLost():
            refusal = "hand-off lost"
        case on.OutputEvent():
            return _completed(migration)
    if refusal:
        migration = replace(migration, attempt=replace(attempt, decode_over=True))
        return _failed(migration, f"target: {refusal}")
    return MigrationResult(migration)


def _held(
    migration: Migration, source: Attempt, held: on.SourceHeld, now: float
) -> MigrationResult:
    if migration.step is not MigrationStep.HOLDING:
        return MigrationResult(migration)
    if not held.complete:
        return _failed(migration, "token ids are missing")
    attempt = Attempt(held.target_attempt, migration.target, command_sent=now, migrates=True)
    open_attempt = do.OpenAttempt(attempt.id, attempt.decode, migrates=True)
    admit = do.SendAdmit(attempt.id, source.decode, 0)
    migration = replace(migration, step=MigrationStep.ADMITTING, attempt=attempt)
    return MigrationResult(migration, actions=(open_attempt, admit))


def _worker_lost(migration: Migration, source: Attempt, event: on.WorkerLost) -> MigrationResult:
    """Apply the loss of the source or the target to the migration. Before the KV is sent, the
    migration fails. While the KV is in transfer, a dead target fails the migration, a dead source
    completes it, since the target reports whether it has the KV, and a broken session decides
    nothing."""
    dead = event.crashed or event.forgotten
    sending = migration.step is MigrationStep.SENDING
    if event.worker == migration.target:
        if sending and not dead:
            return MigrationResult(replace(migration, target_lost=True))
        if migration.attempt is not None:
            ended = replace(migration.attempt, decode_over=True)
            migration = replace(migration, attempt=ended)
        return _failed(migration, "target lost")
    if event.worker == source.decode:
        if not sending:
            return _failed(migration, "source lost", source_knows=True)
        if dead:  # the target has the KV, or reports KvLost if it received anything
            return replace(_completed(migration, source_over=True), sender_died=True)
    return MigrationResult(migration)


def _failed(migration: Migration, reason: str, source_knows: bool = False) -> MigrationResult:
    failed = MigrationOutcome.FAILED
    return MigrationResult(migration, failed, reason, source_knows=source_knows)


def _completed(migration: Migration, source_over: bool = False) -> MigrationResult:
    return MigrationResult(migration, MigrationOutcome.COMPLETED, source_over=source_over)
