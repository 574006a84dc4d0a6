"""Reports of a worker to a router and their times, in a minute of a simulated clock."""

from itertools import pairwise
from random import Random

from pdserve.protos import fleet_pb2 as pb
from pdserve.services.common.stall_detector import StallDetector
from pdserve.services.router.fleet.fleet import SILENCE_S
from pdserve.services.router.servicer import HEARTBEAT_ECHO_S
from pdserve.services.worker.membership import (
    BEAT_S,
    HEARTBEAT_S,
    LOAD_INTERVAL_S,
    SILENT_S,
    SLOT_S,
    WorkerReports,
)

TURN_S = 0.005  # delay until the thread of a lease wakes
Said = list[tuple[float, pb.WorkerReport]]


def minute(load_every_s: float | None, seconds: float = 60.0, begin: float = 0.0) -> Said:
    """Return the reports of a worker whose load changes at this interval. `begin`: on the wall
    clock.
    """
    reports, said = WorkerReports(lambda: pb.Heartbeat(step=1, busy=True)), Said()
    reports.wall_offset = begin
    now, next_load, count = 0.0, 0.0, 0
    while now < seconds:
        if load_every_s is not None and now >= next_load:
            next_load, count = now + load_every_s, count + 1
            reports.add_load(pb.Load(running=count))
        said += [(now, report) for report in reports.due(now)]
        now = max(now + TURN_S, reports.next_due() if load_every_s is None else now)
    return said


def beats(said: Said) -> list[float]:
    return [at for at, r in said if r.HasField("heartbeat") or r.HasField("load_beat")]


def longest_pause(times: list[float]) -> float:
    return max(later - earlier for earlier, later in pairwise(times))


def test_an_idle_worker_has_two_heartbeats_before_it_is_suspect() -> None:
    said = minute(None)
    assert len(said) <= 60 / HEARTBEAT_S + 1
    assert 2 * longest_pause(beats(said)) + 0.1 < SILENCE_S


def test_idle_workers_send_heartbeats_in_the_same_slots() -> None:
    """The slots follow the shared clock, whenever the workers began."""
    for begin in (0.0, 1_700_000_000.123, 1_700_000_000.049, 7.777):
        times = [at + begin for at in beats(minute(None, begin=begin))][1:]
        for at in times:
            past = at % SLOT_S
            assert min(past, SLOT_S - past) < 0.001
        assert max(HEARTBEAT_S - (later - at) for at, later in pairwise(times)) < 0.001


def test_a_load_brings_the_heartbeat() -> None:
    said = minute(0.02)
    assert not any(r.HasField("heartbeat") for _, r in said)
    times = beats(said)
    assert longest_pause(times) < BEAT_S + LOAD_INTERVAL_S + 2 * TURN_S
    assert min(later - at for at, later in pairwise(times)) >= BEAT_S
    assert len(said) < 60 / LOAD_INTERVAL_S + 2, "no more reports than the loads alone take"


def test_a_worker_misses_two_echoes_before_it_joins_again() -> None:
    assert 2 * (HEARTBEAT_ECHO_S + HEARTBEAT_S) < SILENT_S


def test_rare_loads_do_not_delay_heartbeats() -> None:
    for every_s in (0.2, 0.39, 0.5, 3.0):
        said = minute(every_s)
        assert longest_pause(beats(said)) < HEARTBEAT_S + 2 * TURN_S
        assert len(said) <= 60 * (1 / HEARTBEAT_S + 1 / every_s) + 2


def test_an_engine_that_hangs_is_found_by_its_heartbeats_within_ten_seconds() -> None:
    """The engine's counter may have moved just before, and no load reports a change any more."""
    engine, found = StallDetector(), list[float]()
    for at in beats(minute(None)):
        if engine.look(7, True, at):
            found.append(at)
    assert 8.0 <= found[0] <= 8.0 + HEARTBEAT_S + 2 * TURN_S < 10 - 1.0


def test_the_newest_load_is_sent_eventually() -> None:
    reports, rng = WorkerReports(pb.Heartbeat), Random(4)
    now, newest, last = 0.0, 0, pb.Load()
    for _ in range(500):
        now += rng.choice((0.001, 0.03, 0.2))
        if rng.random() < 0.6:
            newest += 1
            reports.add_load(pb.Load(running=newest))
        for report in reports.due(now):
            if report.HasField("load"):
                last = report.load
    for report in reports.due(now + 1):
        last = report.load if report.HasField("load") else last
    assert last.running == newest


def test_concurrent_messages_are_sent_in_order() -> None:
    reports = WorkerReports(pb.Heartbeat)
    reports.add_goodbye(pb.Goodbye(reason="upgrade"))
    reports.add_prefixes([pb.PrefixEvents(reset=True), pb.PrefixEvents(sequence=1)])
    reports.add_load(pb.Load(running=1))
    due = list(reports.due(0.0))
    kinds = [report.WhichOneof("report") for report in due]
    assert kinds == ["goodbye", "prefixes", "prefixes", "load"]
    assert due[-1].HasField("load_beat")
    assert not list(reports.due(0.01))
