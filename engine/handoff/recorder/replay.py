"""Replays one side of an attempt in one process through the machine, from its records; pure.

Every `take` yields the rules that the record breaks. An attempt whose older records are overwritten
or damaged is only checked step by step.
"""

from collections.abc import Iterator
from dataclasses import fields, replace

from pdserve.engine.handoff.protocol import machine
from pdserve.engine.handoff.protocol.machine import (
    Action,
    Actions,
    Event,
    Handoff,
    HandoffEnded,
    Phase,
    Side,
    Tick,
)
from pdserve.engine.handoff.recorder.event_log import (
    MAX_ARGUMENT,
    PEER_NOTIFIED,
    Record,
    Recording,
    RecordKind,
    action_bits,
)
from pdserve.engine.handoff.recorder.timeline import Entry

INF = float("inf")
SLACK_S = 0.1  # maximum time between reading a clock and writing the record
OWED_RECORDS = {Action.FREE_BLOCKS: RecordKind.FREED, Action.COMMIT: RecordKind.HANDED}


class Replay:
    """Replays the entries of one side in order, including the first one.

    `has_all_records`: the recording has every record of the attempt. `begins`: an attempt may begin
    with the first entry, given what the recording has lost.
    """

    def __init__(self, recording: Recording, first: Entry) -> None:
        record = first.record
        self._recording = recording
        self.has_all_records = record.kind is RecordKind.OPENED and not recording.damaged
        self.begins = self.has_all_records or bool(recording.lost or recording.damaged)
        self.state = Handoff(Side(record.side), INF, record.before)
        self._last = first
        self._before = self.state  # the state before the last step; UNDONE returns to it
        self._opened: Entry | None = None
        self._linked_ns = first.at_ns
        self._has_blocks = False
        self._owed: tuple[RecordKind, Entry] | None = None
        self._expected_cells = 0  # cells
        self._cells = 0

    def take(self, entry: Entry) -> Iterator[str]:
        """Process the next record and yield the rules that it breaks."""
        self._last = entry
        record = entry.record
        if record.event is not None:
            yield from self._step(entry)
        elif self.has_all_records:
            yield from self._check_kind(entry)

    def end(self, engine_sequence: int, orderly: bool) -> Iterator[tuple[Entry, str]]:
        """Yield what is missing at the end of the recording.

        `engine_sequence`: sequence of the last record that the engine thread made. `orderly`: the
        process ended in order.
        """
        if not self.has_all_records:
            return
        if self._owed is not None and self._owed[1].record.sequence < engine_sequence:
            yield self._owed[1], f"the record {self._owed[0].name} is missing"
        if orderly and not self.state.final:
            yield self._last, "the attempt had not ended when the process ended in order"
        if orderly and self._has_blocks:
            yield self._last, "the attempt had blocks when the process ended in order"

    def _step(self, entry: Entry) -> Iterator[str]:
        record = entry.record
        if record.before is not self.state.phase:
            if self.has_all_records:
                yield (
                    f"the phase was {self.state.phase.value}, but the record says "
                    f"{record.before.value}"
                )
            self.state = replace(self.state, phase=record.before)
        state, event = self._input(record, entry.at_ns / 1e9)
        after, actions = machine.step(state, event, entry.at_ns / 1e9)
        if after.phase is not record.after:
            yield f"the machine's next phase is {after.phase.value}"
        if action_bits(actions) != record.argument:
            yield f"the machine's actions are: {', '.join(action.value for action in actions)}"
        if isinstance(event, HandoffEnded | Tick) and after.phase is Phase.RELEASED:
            yield from self._too_early(record, entry.at_ns)
        if after.phase is Phase.CLAIMED and record.before is not Phase.CLAIMED:
            self._linked_ns = entry.at_ns
        self._before, self.state = self.state, replace(after, phase=record.after)
        if self.has_all_records:
            yield from self._record_owed(actions, entry)

    def _input(self, record: Record, now: float) -> tuple[Handoff, Event]:
        """Return the state and event that the process had, as far as the step depends on them."""
        reason = self._recording.reason(record.detail)
        state = replace(self.state, deadline=INF, heard=now, moved=now)
        if record.event is Tick:
            if reason == "deadline":
                return replace(state, deadline=now), Tick()
            if reason == "peer silent":
                return replace(state, heard=-INF), Tick()
            if reason == "peer frozen":
                return replace(state, moved=-INF), Tick()
            return state, HandoffEnded(reason)
        assert record.event is not None
        peer_notified = bool(record.detail & PEER_NOTIFIED)
        # The machine's step depends on none of the other fields.
        values = {"at": now, "reason": reason, "peer_notified": peer_notified}
        event: Event = record.event(**{f.name: values.get(f.name, 0) for f in fields(record.event)})
        return state, event

    def _too_early(self, record: Record, at_ns: int) -> Iterator[str]:
        """Yield if a tick found an end that could not have been reached yet."""
        reason = self._recording.reason(record.detail)
        linked_s = (at_ns - self._linked_ns) / 1e9 + SLACK_S
        if record.event is not Tick or not self.has_all_records:
            return
        if reason == "peer silent" and linked_s < machine.SILENCE_S:
            yield "the peer cannot have been silent for so long"
        if reason == "peer frozen" and linked_s < machine.FROZEN_S:
            yield "the peer cannot have been frozen for so long"
        if reason == "deadline" and self._opened is not None:
            deadline_ms = self._opened.record.argument
            is_due = (at_ns - self._opened.at_ns) / 1e9 + SLACK_S >= deadline_ms / 1000
            if deadline_ms == MAX_ARGUMENT or not is_due:
                yield "the deadline had not passed"

    def _record_owed(self, actions: Actions, entry: Entry) -> Iterator[str]:
        """Note what the process must now do with the blocks, and yield if it cannot."""
        owed = [OWED_RECORDS[action] for action in actions if action in OWED_RECORDS]
        if owed and not self._has_blocks:
            yield "the attempt has no blocks"
        if Action.COMMIT in actions and self._cells != self._expected_cells:
            yield f"committed with {self._cells} of {self._expected_cells} cells"
        if owed:
            self._owed = (owed[0], entry)

    def _check_kind(self, entry: Entry) -> Iterator[str]:
        record, phase = entry.record, self.state.phase
        match record.kind:
            case RecordKind.OPENED:
                if self._opened is not None:
                    yield "opened twice"
                self._opened = entry
            case RecordKind.TAKEN:
                if self._has_blocks:
                    yield "blocks were taken twice"
                elif self.state.final:
                    yield "blocks were taken after the attempt had ended"
                self._has_blocks = True
                self._expected_cells, self._cells = record.argument, 0
            case RecordKind.FREED | RecordKind.HANDED:
                if self._owed is None or self._owed[0] is not record.kind:
                    yield "the machine did not order this"
                self._has_blocks, self._owed = False, None
            case RecordKind.UNDONE:
                if self._owed is None or self._owed[0] is not RecordKind.HANDED:
                    yield "there is no commit to undo"
                self.state, self._owed = self._before, None
            case RecordKind.SENT:
                if not self._has_blocks:
                    yield "a frame was sent from blocks that the attempt does not have"
            case RecordKind.WRITTEN:
                self._cells += record.argument
                if not self._has_blocks or phase is not Phase.RECEIVING:
                    yield "a frame was written into blocks that the attempt does not have"
                elif self._cells > self._expected_cells:
                    yield f"{self._cells} cells written, but {self._expected_cells} were requested"
            case RecordKind.LATE if phase is Phase.RECEIVING:
                yield "a frame was dropped as late while the attempt was receiving"
            case _:
                pass
