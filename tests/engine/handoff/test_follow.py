"""Trace records of a request that waits for the KV of another."""

from itertools import count

import pytest
from oracles.rings import Notes, play

from pdserve.engine.handoff.recorder import EventLog, check, describe, merge, scenario

LEADER, OTHER = bytes(range(16)), bytes(range(100, 116))


class Processes:
    """A router, decode and prefill on one host; the leader's hand-off has no fault."""

    def __init__(self) -> None:
        clock = count(0, 1_000_000).__next__
        roles = ("router", "decode", "prefill")
        self.router, self.decode, self.prefill = (
            Notes(role, role.encode().ljust(16), clock) for role in roles
        )
        EventLog(self.router).route(OTHER, 1, 2)

    def follows(self, reason: str = "attached") -> None:
        EventLog(self.decode).follow(OTHER, 3, LEADER)
        play(LEADER, 1, self.router, self.decode, self.prefill)
        if reason:
            EventLog(self.decode).unfollow(OTHER, reason)
        EventLog(self.router).unroute(OTHER, "")
        for notes in (self.router, self.decode, self.prefill):
            notes.close()

    def recordings(self) -> list[object]:
        return [notes.recording() for notes in (self.router, self.decode, self.prefill)]

    def rules(self) -> list[str]:
        return [violation.rule for violation in check(self.recordings())]  # type: ignore[arg-type]


def test_records_of_a_follower_are_described_in_words() -> None:
    made = Processes()
    made.follows()
    assert made.rules() == []
    recording = made.decode.recording()
    lines = [describe(recording, r) for r in recording.records if r.attempt == OTHER[:8]]
    assert lines == ["waits for 3 blocks of attempt 00010203", "closed: attached"]


def test_violations_of_a_follower_are_reported(subtests: pytest.Subtests) -> None:
    for broken, rule in (
        ("waits", "the follower still waited when the process ended in order"),
        ("twice", "closed twice"),
        ("before", "opened on follow before opened on route"),
        ("handed", "a follower that waits for another attempt's KV was handed KV"),
    ):
        with subtests.test(broken=broken, rule=rule):
            made = Processes()
            if broken == "before":
                made.router.records.clear()
                EventLog(made.decode).follow(OTHER, 3, LEADER)
                EventLog(made.decode).unfollow(OTHER, "attached")
                EventLog(made.router).route(OTHER, 1, 2)
            elif broken == "handed":
                EventLog(made.decode).follow(OTHER, 3, LEADER)
                EventLog(made.decode).unfollow(OTHER, "attached")
                play(OTHER, 2, Notes("router", b"r", made.router.clock), made.decode, made.prefill)
            else:
                made.follows("" if broken == "waits" else "attached")
                if broken == "twice":
                    made.decode.records.insert(-1, made.decode.records[-2])
            assert rule in made.rules()


def test_a_scenario_gives_a_follower_its_leaders_prompt() -> None:
    made = Processes()
    made.follows()
    timeline = merge(made.recordings())  # type: ignore[arg-type]
    made_of = scenario.scenario(timeline, timeline.attempts())
    one, other = (ask["prompt"] for ask in made_of["asks"])
    assert one == other
    assert len(one) == 3 * scenario.BLOCK
    assert made_of["faults"] == []
