"""Rings of a real Sender and Receiver reveal where these deviate from the state machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from builders.engine_kit import fake_engine
from oracles.rings import assert_conform
from systems.eventually import wait_until
from systems.handoff_pair import Pair, local, request

from pdserve.engine.api import PrefillComputed, Step
from pdserve.engine.handoff import endpoint
from pdserve.engine.handoff.protocol import (
    Action,
    Actions,
    Bitmap,
    ClaimGranted,
    Event,
    Filled,
    Handoff,
    machine,
)
from pdserve.engine.handoff.recorder import check, read_rings


class Noted(Pair):
    """A pair whose rings are read when it has ended."""

    def __init__(self, folder: Path) -> None:
        sockets, self.folder = folder / "sockets", folder / "rings"
        sockets.mkdir()
        engines = fake_engine(num_blocks=256), fake_engine(num_blocks=256)
        super().__init__(*engines, "tcp", sockets, rings=self.folder)
        self.closed = False

    def close(self) -> None:
        if not self.closed:
            super().close()
        self.closed = True

    def rules(self) -> set[str]:
        """Return the rules that the pair has broken."""
        self.close()
        return {violation.rule for violation in check(read_rings(self.folder.iterdir()))}


@pytest.fixture
def noted(tmp_path: Path) -> Iterator[Noted]:
    pair = Noted(tmp_path)
    yield pair
    pair.close()


def test_every_record_of_a_hand_off_is_there(noted: Noted) -> None:
    job = request(200)
    attempt = noted.hand_off(job)
    assert noted.answer(job) == local(job)
    noted.wait(lambda: attempt in noted.sent)
    noted.close()
    found = assert_conform(noted.folder)
    for side, event in (
        ("send", "opened"), ("send", "taken"), ("send", "picked"), ("receive", "claimed"),
        ("receive", "taken"), ("receive", "reserved"), ("send", "claim granted"),
        ("receive", "filled"),
        ("receive", "handed"), ("send", "filled"), ("send", "freed"),
    ):  # fmt: skip
        assert found[side, event] == 1, (side, event)
    assert found["send", "sent"] == found["receive", "written"] >= 1


def test_a_commit_without_the_frames(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bitmap, "complete", property(lambda bitmap: True))
    attempt = noted.hand_off(request(200))
    noted.wait(lambda: attempt in noted.received)
    assert "committed with 0 of 50 cells" in noted.rules()


def test_blocks_that_are_not_returned(noted: Noted) -> None:
    noted.receiver.actions[Action.FREE_BLOCKS] = lambda attempt: None
    job = request(200)
    attempt, hits = bytes.fromhex(job.key), []

    def hook(step: Step) -> None:
        """Cancel when decode has the blocks; prefill has not continued meanwhile."""
        if not hits and any(isinstance(event, PrefillComputed) for event in step.events):
            wait_until(lambda: not noted.receiver.is_waiting(attempt), "blocks at decode")
            hits.append(noted.at_decode(lambda r: r.cancel(attempt, "cancelled")))

    noted.prefill_hook = hook
    noted.hand_off(job)
    noted.wait(lambda: attempt in noted.lost)
    assert noted.lost == {attempt: "cancelled"}
    assert {
        "the record FREED is missing",
        "the attempt had blocks when the process ended in order",
    } <= noted.rules()


@pytest.mark.parametrize("action", [Action.GIVE_BACK_PROMISE, Action.SEND_COMPLETE])
def test_an_omitted_action(noted: Noted, monkeypatch: pytest.MonkeyPatch, action: Action) -> None:
    """The shells run a machine with a bug; the checker has the correct one."""

    def step(state: Handoff, event: Event, now: float) -> tuple[Handoff, Actions]:
        after, actions = machine.step(state, event, now)
        return after, tuple(a for a in actions if a is not action)

    monkeypatch.setattr(endpoint, "step", step)
    attempt = noted.hand_off(request(200))
    noted.wait(lambda: attempt in noted.received)
    (rule,) = noted.rules()
    assert rule.startswith("the machine's actions are: ")
    assert action.value in rule


def test_blocks_returned_too_early(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill takes its blocks back when decode asks for them, not when decode has them."""

    def step(state: Handoff, event: Event, now: float) -> tuple[Handoff, Actions]:
        after, actions = machine.step(state, event, now)
        if isinstance(event, ClaimGranted):
            after, more = machine.step(after, Filled(), now)
            actions += more
        return after, actions

    monkeypatch.setattr(endpoint, "step", step)
    attempt = noted.hand_off(request(200))
    noted.wait(lambda: attempt in noted.sent)
    assert {
        "the machine's next phase is receiving",
        "the machine's actions are: send_frames",
    } <= noted.rules()
