"""`pdserve replay`: attempts as text, as a verdict and as a script, from rings of three
processes.
"""

from pathlib import Path

import pytest
from oracles.rings import Played, play
from simulation.run import simulate
from simulation.scenario import Scenario

from pdserve.cli.main import main
from pdserve.engine.handoff.protocol import (
    Claimed,
    ClaimGranted,
    Handoff,
    HandoffEnded,
    Picked,
    Reserved,
    Side,
    step,
)
from pdserve.engine.handoff.recorder import MAX_ARGUMENT, EventLog, RecordKind, open_ring
from pdserve.engine.handoff.recorder.ring import Ring

FIRST, SECOND = bytes(range(16)), bytes(range(100, 116))


@pytest.fixture
def rings(tmp_path: Path) -> Path:
    """Return rings of two hand-offs without a fault."""
    made = [open_ring(str(tmp_path), role, role.encode() * 4, 1) for role in ROLES]
    for number, attempt in enumerate((FIRST, SECOND), 1):
        play(attempt, number, *(ring for ring in made if ring is not None))
    for ring in made:
        assert ring is not None
        ring.close()
    return tmp_path


ROLES = ("router", "decode", "prefill")


def test_an_attempt_has_a_line_for_each_record(
    rings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *map(str, sorted(rings.iterdir()))]) == 0
    first, second, rest = capsys.readouterr().out.split("\n\n")
    assert rest == ""
    head, *lines = first.splitlines()
    assert head == "attempt 0001020304050607, request 1 try 1"
    assert second.startswith("attempt 6465666768696a6b, request 2 try 1")
    assert " ".join(lines[0].split()) == "0.000000 router-726f75 route opened: try 1 of request 1"
    assert any("decode-" in line and "frame 6 written: 3 new cells" in line for line in lines)
    assert any("filled: receiving -> committed; free_blocks, report_done" in line for line in lines)
    times = [float(line.split()[0]) for line in lines]
    assert times == sorted(times)
    assert len(lines) == 18


def test_attempts_are_chosen_by_prefix(rings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for prefix in ("64", SECOND.hex().upper()):
        assert main(["replay", str(rings), "--attempt", prefix]) == 0
        assert capsys.readouterr().out.count("attempt ") == 1
    assert main(["replay", str(rings), "--attempt", "ff"]) == 1
    assert "no attempt matches --attempt" in capsys.readouterr().out


def test_check_reports_violations_in_its_exit_code(
    rings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(rings), "--check"]) == 0
    assert capsys.readouterr().out == "2 attempts, 36 records, 0 violations\n"
    extra = Ring(rings / "z.ring", "prefill", b"wrong" * 3, 1 << 16)
    state = Handoff(Side.SEND, 1.0)
    trace, event = EventLog(extra), HandoffEnded("cancelled")
    trace.record(RecordKind.OPENED, b"x" * 16, state, 0, MAX_ARGUMENT)
    trace.step(b"x" * 16, event, state, step(state, event, 0.0)[0], ())
    extra.close()
    assert main(["replay", str(rings), "--check"]) == 1
    out = capsys.readouterr().out
    assert "attempt 7878787878787878: the machine's actions are: leave_queue, report_lost" in out
    assert "> " in out
    assert out.endswith("3 attempts, 38 records, 1 violations\n")
    assert main(["replay", str(rings), "--check", "--attempt", "00"]) == 0


def test_a_scenario_of_the_simulation(rings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(rings), "--seed"]) == 0
    scenario = Scenario.from_json(capsys.readouterr().out)
    assert [len(ask.prompt) for ask in scenario.asks] == [12, 12], "three blocks each"
    assert scenario.asks[0].at_s == 0.0 < scenario.asks[1].at_s
    assert (scenario.routers, scenario.prefills, scenario.decodes) == (1, 1, 1)
    assert not scenario.faults
    result = simulate(scenario)
    assert not result.violations
    assert set(result.answers.values()) == {"finished"}


ENDS: list[tuple[str, str, str, str]] = [
    ("receive", "peer silent", "SIGSTOP prefill", "transferring"),
    ("send", "peer silent", "SIGSTOP decode", "transferring"),
    ("receive", "frame: of another layer", "bit flip", "transferring"),
    ("receive", "connection: reset", "reset prefill-decode", "transferring"),
    ("receive", "cancelled", "client closes", "transferring"),
    ("killed", "connection: closed", "SIGKILL prefill", "transferring"),
]


@pytest.mark.parametrize(("side", "reason", "kind", "phase"), ENDS, ids=lambda v: str(v)[:16])
def test_the_end_of_an_attempt_becomes_the_fault(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    side: str,
    reason: str,
    kind: str,
    phase: str,
) -> None:
    """The simulation accepts the scenario and applies the fault at the same point."""
    made = [open_ring(str(tmp_path), role, role.encode() * 4, 1) for role in ROLES]
    router, decode, prefill = (ring for ring in made if ring is not None)
    play(FIRST, 1, router, decode, prefill)
    EventLog(router).route(SECOND, 1, 2)
    receive, send = Played(decode, Side.RECEIVE, SECOND), Played(prefill, Side.SEND, SECOND)
    send.record(RecordKind.TAKEN, 7)
    send.does(Picked())
    receive.does(Claimed())
    receive.record(RecordKind.TAKEN, 7, 14)
    receive.does(Reserved())
    send.does(ClaimGranted())
    send.record(RecordKind.SENT, 3, 2)
    (send if side == "send" else receive).does(HandoffEnded(reason))
    EventLog(router).unroute(SECOND, "prefill p: hand-off lost")
    if side != "killed":
        prefill.close()
    decode.close()
    router.close()
    assert main(["replay", str(tmp_path), "--seed"]) == 0
    scenario = Scenario.from_json(capsys.readouterr().out)
    (fault,) = scenario.faults
    assert (fault.kind, fault.phase, fault.index) == (kind, phase, 0)
    assert len(scenario.ask(fault.request).prompt) == 28
    result = simulate(scenario)
    assert not result.violations
    assert result.hits == [(kind, phase)]


@pytest.mark.parametrize("content", [b"", b"PDSVRING", b"x" * 10_000])
def test_a_file_that_is_no_ring_is_named(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.ring"
    assert main(["replay", str(tmp_path)]) == 1
    assert "no .ring file in this folder" in capsys.readouterr().err
    path.write_bytes(content)
    assert main(["replay", str(path)]) == 1
    assert "bad.ring: the file is not a ring" in capsys.readouterr().err


def test_lost_records_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring = Ring(tmp_path / "a.ring", "router", b"r" * 16, 4096 + 10 * 32)
    for number in range(10):
        EventLog(ring).route(FIRST, number, 5)
        EventLog(ring).unroute(FIRST, "busy")
    ring.close()
    data = bytearray((tmp_path / "a.ring").read_bytes())
    for slot in (5, 6):  # one may be half-written
        data[4096 + slot * 32] ^= 1
    (tmp_path / "a.ring").write_bytes(data)
    assert main(["replay", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == "router-727272: 11 older records overwritten, 1 records damaged\n"
    assert "closed: busy" in captured.out
