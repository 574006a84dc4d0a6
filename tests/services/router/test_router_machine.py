"""The state machine of a request under any sequence of events, compared with a plain record.

Thousands of seeds: most events are plausible in the current state, the others are arbitrary events
about any attempt. The record sees only the actions of the machine.
"""

import ast
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from oracles.handoff_model.bugs import counts_no_try, hears_every_attempt, retries_without_a_cancel

from pdserve.services import router
from pdserve.services.router.request import Reachability, machine
from pdserve.services.router.request import actions as do
from pdserve.services.router.request import events as on
from pdserve.services.router.request.machine import MAX_ATTEMPTS
from pdserve.services.router.request.state import Attempt, Migration, Routing, Stage

DECODES, PREFILLS = (b"d0", b"d1", b"d2"), (b"p0", b"p1")
ERROR = RuntimeError("no")
QUEUED, SEEKING, RESUMING, ADMITTING, PREFILLING, RUNNING, ENDED = (
    *(Stage.QUEUED, Stage.SEEKING, Stage.RESUMING, Stage.ADMITTING),
    *(Stage.PREFILLING, Stage.RUNNING, Stage.ENDED),
)
# The edges drawn in machine.py; a migration's switch leads from SEEKING and RESUMING to RUNNING,
# and from RUNNING to SEEKING.
DRAWN = {
    (QUEUED, ADMITTING), (QUEUED, SEEKING), (QUEUED, RESUMING), (QUEUED, ENDED),
    (SEEKING, RESUMING), (SEEKING, QUEUED), (SEEKING, RUNNING), (SEEKING, ENDED),
    (RESUMING, RUNNING), (RESUMING, PREFILLING), (RESUMING, QUEUED), (RESUMING, SEEKING),
    (RESUMING, ENDED),
    (ADMITTING, PREFILLING), (ADMITTING, RUNNING), (ADMITTING, QUEUED), (ADMITTING, ENDED),
    (PREFILLING, RUNNING), (PREFILLING, QUEUED), (PREFILLING, SEEKING), (PREFILLING, ENDED),
    (RUNNING, QUEUED), (RUNNING, SEEKING), (RUNNING, ENDED),
}  # fmt: skip
# Decode's messages for an attempt that it no longer has.
OVER_AT_DECODE = (
    *(on.AdmitRefused, on.AttemptUnknown, on.AttemptFailed, on.AttemptFinished, on.KvLost),
    *(on.WaitFailed, on.SourceMoved),
)


class Drive:
    """One request with randomly drawn events."""

    def __init__(self, seed: int, step: Callable[..., Any] = machine.step) -> None:
        self.random = Random(seed)
        self.step = step
        self.now = 100.0
        begun = self.random.random() < 0.5
        self.state = Routing(
            epoch=seed % 3,
            deadline=self.random.choice([None, None, 200.0]),
            queue_s=20.0,
            queue_deadline=self.random.choice([None, 120.0]),
            begun=begun,
            placed_attempt=b"old",
            placed_decode=DECODES[0],
            seek_start=self.now,
        )
        self.num_attempts = 0  # ids given
        self.open: dict[bytes, do.OpenAttempt] = {}
        self.at_decode: set[bytes] = set()  # attempts that decode may run, by its commands
        self.over: set[bytes] = set()  # attempts that decode has reported as over
        self.over_at_prefill: set[bytes] = set()
        self.at_prefill: set[bytes] = set()
        self.terminal = 0
        self.tries = 0  # begun, minus those that decode refused
        self.edges: Counter[tuple[Stage, Stage]] = Counter()
        self.seen: Counter[str] = Counter()

    def new_attempt(self) -> bytes:
        self.num_attempts += 1
        return b"a%d" % self.num_attempts

    # --- events

    def plausible(self) -> on.RoutingEvent:
        """Draw an event that is plausible now."""
        state, random = self.state, self.random
        attempt, migration = state.attempt, state.migration
        reach = random.choice([*[Reachability.YES] * 3, *Reachability])
        if random.random() < 0.12:
            return on.TimePassed(reach, random.choice(list(Reachability)))
        if state.stage is SEEKING:
            if attempt is not None and migration is not None and random.random() < 0.5:
                return self._of_migration(attempt, migration)
            return on.TimePassed(reach, reach)
        if attempt is None:
            prefill = random.choice([b"", *PREFILLS])
            follows = random.random() < 0.2
            begin = on.AttemptBegun(self.new_attempt(), random.choice(DECODES), prefill, follows)
            return random.choice([begin, begin, begin, on.Queued()])
        if migration is not None:
            return self._of_migration(attempt, migration)
        if state.stage is ADMITTING:
            return self._answer(attempt.id)
        if state.stage is RESUMING:
            epoch = state.session_epoch - (random.random() < 0.2)
            ticket = random.random() < 0.5
            resumed = on.ResumeAccepted(attempt.id, epoch, ticket, random.choice(PREFILLS), reach)
            return random.choice([resumed, resumed, on.AttemptUnknown(attempt.id)])
        if state.stage is PREFILLING:
            return random.choice([self._of_prefill(attempt.id), self._output(attempt.id)])
        if state.may_migrate(self.now) and random.random() < 0.3:
            return on.MigrationBegun(random.choice(DECODES))
        return self._output(attempt.id)

    def _of_migration(self, source: Attempt, migration: Migration) -> on.RoutingEvent:
        target = b"" if migration.attempt is None else migration.attempt.id
        held = on.SourceHeld(source.id, self.random.random() < 0.9, self.new_attempt())
        events: list[on.RoutingEvent] = [held, on.SourceStayed(source.id, "no"), self._loss()]
        if target:
            events += [self._answer(target), self._answer(target), self._output(target)]
            events += [on.WorkerLost(source.decode, "session lost", False, False)]
            events += [on.SourceMoved(source.id, target), on.SourceMoved(source.id, b"other")]
        return self.random.choice(events)

    def _answer(self, attempt: bytes) -> on.RoutingEvent:
        admitted = on.AdmitAccepted(attempt, self.random.random() < 0.7)
        other = [on.AttemptFailed(attempt, ERROR, True), on.AttemptUnknown(attempt)]
        return self.random.choice([*[admitted] * 4, on.AdmitRefused(attempt), *other])

    def _output(self, attempt: bytes) -> on.RoutingEvent:
        tokens = on.TokensReceived(attempt, True, self.random.random() < 0.1)
        rare = [on.ScoresReceived(attempt), on.OutputMissing(attempt, "gap", True)]
        rare += [on.AttemptFinished(attempt), on.KvLost(attempt, "lost")]
        rare += [on.WaitEnded(attempt), on.WaitFailed(attempt, "vain")]
        return self.random.choice([*[tokens] * 6, *rare])

    def _of_prefill(self, attempt: bytes) -> on.RoutingEvent:
        ended = on.PrefillEnded(attempt, "failed", self.random.random() < 0.5)
        return self.random.choice([on.PrefillStarted(attempt), on.PrefillSent(attempt), ended])

    def _loss(self) -> on.RoutingEvent:
        crashed = self.random.random() < 0.4
        forgotten = crashed or self.random.random() < 0.2
        worker = self.random.choice([*DECODES, *PREFILLS])
        return on.WorkerLost(worker, "lost", crashed, forgotten)

    def anything(self) -> on.RoutingEvent:
        """Draw an event about any attempt: the current one, one that is over, or an unknown one."""
        attempt = b"a%d" % self.random.randint(0, self.num_attempts + 1)
        rare = [on.RequestCancelled(), on.ClientLeft(), on.RequestRefused(ERROR)]
        rare += [on.Reissued(True), on.Reissued(False), on.MigrationBegun(DECODES[1])]
        choices = on.ChoicesCancelled((0,), self.state.complete or self.random.random() < 0.2)
        common = [self._answer(attempt), self._output(attempt), self._of_prefill(attempt)]
        common += [self._loss(), self._loss(), choices, on.SourceMoved(attempt, b"a1")]
        common += [on.ResumeAccepted(attempt, 0, True), on.SourceStayed(attempt, "")]
        return self.random.choice(common if self.random.random() < 0.93 else rare)

    # --- the record

    def run(self, steps: int) -> None:
        first = self.random.choice([None, None, *Reachability])
        self.take(on.Submitted(first))
        for _ in range(steps):
            self.now += self.random.choice([0.0, 0.01, 0.2, 0.2, 2.0])
            self.take(self.plausible() if self.random.random() < 0.85 else self.anything())
            if self.state.stage is ENDED and self.random.random() < 0.3:
                return

    def take(self, event: on.RoutingEvent) -> None:
        before = self.state
        self.state, actions = self.step(before, event, self.now)
        if before.stage is ENDED:
            assert (self.state, actions) == (before, ())
            return
        named = getattr(event, "attempt", None)
        if named is not None and named not in self.open and not isinstance(event, on.AttemptBegun):
            assert (self.state, actions) == (before, ()), "of an attempt that is over"
        if isinstance(event, OVER_AT_DECODE):
            self.over.add(event.attempt)
        if isinstance(event, on.PrefillSent | on.PrefillEnded):
            self.over_at_prefill.add(event.attempt)
        if isinstance(event, on.WorkerLost):
            self._lose(event, before)
        for number, action in enumerate(actions):
            self.record(action, event, before)
            assert isinstance(action, do.Place) <= (number == len(actions) - 1), (
                "Place must be the last action"
            )
        self.check(event, before, actions)
        self.check_what_only_forwards()

    def check_what_only_forwards(self) -> None:
        """Check that the machine does nothing with such tokens, nor with the time before
        `quiet_until`: the caller skips it for both.
        """
        if self.state.only_forwards:
            assert self.state.attempt is not None
            attempt = self.state.attempt.id
            tokens = on.TokensReceived(attempt, True, self.state.complete)
            assert machine.step(self.state, tokens, self.now) == (
                self.state,
                (do.Forward(attempt),),
            )
            self.seen["only passed on"] += 1
            for reach in Reachability:
                if self.now < self.state.quiet_until:
                    passed = on.TimePassed(reach, reach)
                    assert machine.step(self.state, passed, self.now) == (self.state, ())
                    self.seen["quiet"] += 1

    def _lose(self, event: on.WorkerLost, before: Routing) -> None:
        """Record attempts that need no cancel: a dead worker's, and a migration's target, or its
        source when it is forgotten, since these end by themselves.
        """
        for attempt, how in self.open.items():
            own = before.attempt is not None and before.attempt.id == attempt
            ends = event.crashed or not own or (event.forgotten and before.migration is not None)
            if how.decode == event.worker and ends:
                self.over.add(attempt)

    def record(self, action: do.RoutingAction, event: on.RoutingEvent, before: Routing) -> None:
        self.seen[type(action).__name__] += 1
        match action:
            case do.OpenAttempt():
                assert action.attempt not in self.open
                self.open[action.attempt] = action
                self.tries += not (action.adopted or action.migrates)
            case do.SendAdmit() | do.SendResume():
                assert action.attempt in self.open
                self.at_decode.add(action.attempt)
            case do.SendPrefillStart():
                assert action.attempt in self.open
                self.at_prefill.add(action.attempt)
            case do.CancelAtDecode():
                assert action.attempt in self.open
                if not action.choices:
                    self.at_decode.discard(action.attempt)
            case do.CancelAtPrefill():
                self.at_prefill.discard(action.attempt)
            case do.LeaveToSuccessor() | do.HandOver():
                self.at_decode.clear()
                self.at_prefill.clear()
            case do.CloseAttempt():
                del self.open[action.attempt]
                running = self.at_decode - self.over
                assert action.attempt not in running, "it was not cancelled at decode"
                complete = isinstance(event, on.AttemptFinished | on.WaitFailed)
                moved = action.lost == "moved"
                running = self.at_prefill - self.over_at_prefill
                assert complete or moved or action.attempt not in running
            case do.SendFinished() | do.SendFailed():
                self.terminal += 1
            case do.Place():
                refused = isinstance(event, on.AdmitRefused | on.WaitFailed | on.AttemptFailed)
                unanswered = isinstance(event, on.TimePassed) and before.stage is ADMITTING
                self.tries -= (refused or unanswered) and self.tries > 0

    def check(
        self, event: on.RoutingEvent, before: Routing, actions: tuple[do.RoutingAction, ...]
    ) -> None:
        state = self.state
        live = {} if state.attempt is None else {state.attempt.id}
        target = None if state.migration is None else state.migration.attempt
        handed_over = {a.attempt for a in actions if isinstance(a, do.HandOver)}
        assert set(self.open) - handed_over == {*live, *([] if target is None else [target.id])}
        assert (state.attempt is None) <= (state.migration is None)
        assert (state.attempt is not None) or state.stage in (QUEUED, SEEKING, ENDED)
        reissued = isinstance(event, on.Reissued)
        assert self.terminal == (state.stage is ENDED and not reissued)
        assert self.tries <= MAX_ATTEMPTS
        if before.stage is not state.stage:
            self.edges[before.stage, state.stage] += 1


def drive(seeds: range, step: Callable[..., Any] = machine.step) -> list[Drive]:
    driven = [Drive(seed, step) for seed in seeds]
    for one in driven:
        one.run(150)
    return driven


def test_one_end_every_cancel_and_never_two_attempts_over_any_events() -> None:
    driven = drive(range(1500))
    edges = sum((one.edges for one in driven), Counter[tuple[Stage, Stage]]())
    assert set(edges) == DRAWN
    seen = sum((one.seen for one in driven), Counter[str]())
    kinds = {name for name in vars(do) if isinstance(getattr(do, name), type)}
    missing = {
        n
        for n in kinds - {"FailureReason", "Enum", "RoutingAction", "AttemptAction"}
        if seen[n] < 3
    }
    assert missing == set()
    assert seen["only passed on"] > 1000
    assert sum(one.state.stage is ENDED for one in driven) > 1000


@pytest.mark.parametrize("wrong", [retries_without_a_cancel, hears_every_attempt, counts_no_try])
def test_a_faulty_machine_is_detected(wrong: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError):
        drive(range(1500), wrong)


def test_tries_are_bounded() -> None:
    """Decode answers each Admit with Gone: one try after another is lost, and all are counted."""
    state, actions = machine.step(Routing(), on.Submitted(), 0.0)
    for number in range(MAX_ATTEMPTS):
        assert actions[-1] == do.Place()
        name = b"%d" % number
        state, _ = machine.step(state, on.AttemptBegun(name, DECODES[0]), 0.0)
        state, actions = machine.step(state, on.AttemptUnknown(name), 0.0)
    assert do.SendFailed(do.FailureReason.NO_ATTEMPT_LEFT) in actions
    assert state.stage is ENDED


def test_a_request_that_crashed_two_workers_is_not_tried_a_third_time() -> None:
    state, actions = machine.step(Routing(), on.Submitted(), 0.0)
    for number, decode in enumerate(DECODES[:2]):
        assert actions[-1] == do.Place()
        name = b"%d" % number
        for event in (on.AttemptBegun(name, decode), on.AdmitAccepted(name, False)):
            state, _ = machine.step(state, event, 0.0)
        lost = on.WorkerLost(decode, "died", True, True)
        state, actions = machine.step(state, lost, 0.0)
    assert do.SendFailed(do.FailureReason.POISON) in actions


def test_a_successor_takes_the_answer_that_decode_owes() -> None:
    begun = on.AttemptBegun(b"a", DECODES[0], PREFILLS[0])
    old, _ = machine.step(Routing(), begun, 0.0)
    ended, actions = machine.step(old, on.Reissued(same_progress=True), 0.0)
    assert (ended.stage, actions) == (ENDED, (do.HandOver(b"a"),))
    assert old.attempt is not None
    new = machine.taken_over(Routing(epoch=1), old.attempt)
    new, actions = machine.step(new, on.AdmitAccepted(b"a", True), 0.0)
    assert new.stage is PREFILLING
    assert do.SendPrefillStart(b"a", PREFILLS[0]) in actions
    _, actions = machine.step(old, on.Reissued(same_progress=False), 0.0)
    assert actions[0] == do.CancelAtDecode(b"a")


def test_only_the_machine_writes_a_stage() -> None:
    """The state is frozen, and no other module of the router makes one with a stage."""
    with pytest.raises(AttributeError):
        Routing().stage = RUNNING  # type: ignore[misc]
    assert replace(Routing(), epoch=1).stage is QUEUED
    folder = Path(router.__file__).parent
    writing = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and gives_a_stage(call)
    }
    assert writing == {"request/machine.py"}


def gives_a_stage(call: ast.Call) -> bool:
    """Return whether a call sets a stage: by name, by position, or possibly in a mapping that is
    unpacked into a state.
    """
    makes = ast.unparse(call.func).rpartition(".")[2] in ("Routing", "replace")
    unpacked = any(word.arg is None for word in call.keywords)
    more = call.args[ast.unparse(call.func).endswith("replace") :]  # without the state to replace
    return any(word.arg == "stage" for word in call.keywords) or (makes and bool(unpacked or more))


def test_a_written_stage_is_detected() -> None:
    for code, given in {
        "replace(state, stage=RUNNING)": True,
        "self.set(stage=Stage.ENDED)": True,
        "state.Routing(0, None)": True,
        "Routing(**fields)": True,
        "dataclasses.replace(state, **changes)": True,
        "Routing(epoch=1)": False,
        "replace(state, epoch=1)": False,
    }.items():
        (call,) = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))
        assert gives_a_stage(call) is given, code
