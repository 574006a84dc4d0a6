"""cuda_ipc on the fake device: the peer process dies, freezes or writes late."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.device import FakeSignal, pages_of
from systems.cuda_child import SIZE, frame, payload
from systems.eventually import wait_until
from systems.link_ends import COPY_KEY, Ends, Recorder
from systems.open_files import open_files

from pdserve.engine.handoff.connection import DataLink
from pdserve.engine.handoff.protocol import FrameHeader
from pdserve.engine.transport import SLOTS, Payload

SUPPORT = Path(__file__).parents[2] / "support"
KILLS = 6  # per side; benchmarks/gpu/parts/kills.py does 40 per side on a GPU


class Keeper(Recorder):
    """Keeps arriving payloads until the test takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[tuple[DataLink, FrameHeader, Any]] = []

    def payload(self, link: DataLink, header: FrameHeader, payload: Payload) -> None:
        self.sources.append((link, header, payload))


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends("cuda_ipc", tmp_path)
    made.decode = Keeper()
    yield made
    made.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    children: list[subprocess.Popen[str]] = []

    def run(mode: str) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "systems.cuda_child", mode, tmp_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        children.append(child)
        return child

    yield run
    for child in children:
        child.kill()
        child.communicate()


def first(ends: Ends, count: int = 1) -> Any:
    """Return the source of the `count`th frame."""
    keeper: Any = ends.decode
    wait_until(lambda: len(keeper.sources) >= count)
    return keeper.sources[count - 1][2]


def take(source: Any) -> tuple[bool, np.ndarray]:
    target = np.zeros(SIZE, np.uint8)
    copy = source.copy_in(pages_of(target), COPY_KEY)
    copy.wait()
    return copy.intact, target


def is_stopped(pid: int) -> bool:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return all("\nState:\tT" in (thread / "status").read_text() for thread in threads)


def window_of(ends: Ends, link: int) -> Any:
    return ends.decode.wires[link]._window  # type: ignore[attr-defined]


def test_a_writer_killed_during_its_copy(ends: Ends, start: Any) -> None:
    child = start("half")
    source = first(ends)
    assert not source.ready(), "the frame has arrived, but its copy is not done"
    window = window_of(ends, 0)
    child.send_signal(signal.SIGKILL)
    child.wait()
    wait_until(lambda: len(ends.decode.reasons) == 1)
    assert not source.ready(), "it never will be ready, and decode does not wait for it"
    counts = source.slot.signal.counts
    assert isinstance(source.slot.signal, FakeSignal)
    counts[1] = counts[0]  # as with a driver that reports the dead process's work as done
    assert source.ready()
    intact, _ = take(source)
    assert not intact, "half of the payload is missing"
    start("late")
    intact, data = take(first(ends, 2))
    assert intact
    assert (data == payload(7)).all()
    assert window_of(ends, 1) is window, "the dead process's window must be reused"


def test_late_writes_change_only_the_window(ends: Ends, start: Any) -> None:
    child = start("late")
    source = first(ends)
    intact, data = take(source)
    assert intact
    child.stdin.write("again\n")
    child.stdin.flush()
    assert child.stdout.readline() == "late\n"
    assert (data == payload(7)).all()
    intact, later = take(source)
    assert (later == 0xEE).all(), "the late write did not happen"
    assert not intact, "a copy made now must be refused"


def test_a_frozen_writer_keeps_its_window(ends: Ends, start: Any) -> None:
    """A writer is stopped, given up and resumed. It never writes into its successor's window."""
    child = start("late")
    first(ends)
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(child.pid), "all its threads are stopped")
    ends.decode.links[0].close("peer silent")
    second = start("late")
    source = first(ends, 2)
    assert window_of(ends, 1) is not window_of(ends, 0)
    child.send_signal(signal.SIGCONT)
    child.stdin.write("again\n")
    child.stdin.flush()
    assert child.stdout.readline() == "late\n"
    intact, data = take(source)
    assert intact
    assert (data == payload(7)).all()
    assert second.poll() is None


def test_writers_killed_at_random_moments(ends: Ends, start: Any) -> None:
    keeper: Any = ends.decode
    taken = 0
    for round in range(KILLS):
        child = start("flood")
        for _ in range(1 + 5 * round):
            first(ends, taken + 1)
            link, header, source = keeper.sources[taken]
            intact, data = take(source)
            assert intact
            assert (data == payload(header.sequence)).all()
            link.credit(header)
            taken += 1
        child.kill()
        child.wait()
        over = round + 1
        wait_until(lambda over=over: len(keeper.reasons) == over)
        taken = len(keeper.sources)  # ignore frames after the last one taken
    assert len({id(window_of(ends, i)) for i in range(KILLS)}) == 1, (
        "one window must serve all writers"
    )


def test_a_writer_reports_that_it_closed_its_window(ends: Ends) -> None:
    """The window may then be reused, or freed by decode."""
    link = ends.dial(Recorder())
    link.push(frame(1, lambda slot: None))
    first(ends)
    window = window_of(ends, 0)
    assert not window.is_unused()
    link.close()
    wait_until(window.is_unused)


def test_decode_killed_at_random_moments(tmp_path: Path, start: Any) -> None:
    """Prefill's copies end, its window is closed, and it continues with the next decode."""
    ends = Ends("cuda_ipc", tmp_path)
    ends.listener.close()  # only dialling is used
    files = open_files()
    for round in range(KILLS):
        child = start("serve")
        assert child.stdout.readline() == "listening\n"
        prefill = Recorder()
        link = ends.dial(prefill)
        sent: list[Any] = []
        for sequence in range(3 + SLOTS + round):
            link.push(frame(sequence, sent.append))
        for _ in range(1 + round % 3):
            assert child.stdout.readline() == "frame\n"
        child.kill()
        child.wait()
        wait_until(lambda ended=prefill.reasons: len(ended) == 1)
        link.close()
        assert link.ended
        assert sent
        child.communicate()
        for path in tmp_path.glob("*.sock"):
            path.unlink()  # `pdserve up` removes such remains of a killed process
    ends.transport.close()
    assert open_files() - files == set()
