"""A memory window has one writer at a time: it is not reused while a living process may still write
into it."""

import random
from collections import Counter

import pytest

from pdserve.engine.transport import DeviceError
from pdserve.engine.transport.cuda_ipc import windows as windows_module
from pdserve.engine.transport.cuda_ipc.windows import DeviceWindow, DeviceWindows

NOBODY = 0  # has a window open; real pids are larger


class FakeWriter:
    def __init__(self, pid: int, dead: set[int]) -> None:
        self.pid, self._dead, self.closed = pid, dead, 0
        self.said = False

    def gone(self) -> bool:
        return self.said or self.pid in self._dead

    def close(self) -> None:
        self.closed += 1


class FakeMemory:
    def __init__(self) -> None:
        self.address, self.size, self.closed = 0, 0, 0

    def handle(self) -> bytes:
        return bytes(64)

    def close(self) -> None:
        self.closed += 1


def test_random_lifetimes_of_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process connects, leaves, freezes (it has left but lives) and dies, in any order."""
    monkeypatch.setattr(windows_module, "CLOSE_S", 0.0)
    reached: Counter[str] = Counter()
    for seed in range(200):
        rng = random.Random(seed)
        made: list[DeviceWindow] = []

        def make(made: list[DeviceWindow] = made) -> DeviceWindow:
            made.append(DeviceWindow(FakeMemory(), [], FakeMemory()))
            return made[-1]

        windows, dead = DeviceWindows(make), set[int]()
        lent: list[tuple[DeviceWindow, FakeWriter]] = []
        last: dict[int, int] = {}  # id of window -> pid of its last writer
        writers: list[FakeWriter] = []
        for _ in range(60):
            act = rng.choice(("take", "take", "leave", "leave", "die", "prepare"))
            if act == "take":
                pid = rng.choice([p for p in range(1, 99) if p not in dead][:4])
                writers.append(FakeWriter(pid, dead))
                num_made = len(made)
                window = windows.take(writers[-1])
                assert all(window is not other for other, _ in lent)
                before = last.get(id(window))
                assert before in (None, NOBODY, pid) or before in dead
                if before == NOBODY:
                    reached["after a word"] += 1
                elif before is not None:
                    reached["the same again" if before == pid else "after a death"] += 1
                elif any(p not in dead and p not in (pid, NOBODY) for p in last.values()):
                    reached["not that of a living"] += len(made) > num_made
                last[id(window)] = pid
                lent.append((window, writers[-1]))
            elif act == "leave" and lent:
                window, writer = lent.pop(rng.randrange(len(lent)))
                windows.give_back(window)
                if rng.random() < 0.5:
                    writer.said = True
                    if all(other.gone() for other in window.writers):
                        last[id(window)] = NOBODY
            elif act == "die" and last:
                dead.add(rng.choice(list(last.values())))
                dead.discard(NOBODY)
            elif act == "prepare":
                windows.prepare()
        kept = [w for w in made if any(not one.gone() for one in w.writers)]
        windows.close()
        assert not any(window.memory.closed for window, _ in lent)  # type: ignore[attr-defined]
        for window, writer in lent:
            writer.said = True
            windows.give_back(window)
        for window in made:
            still_open = window in kept and not all(one.gone() for one in window.writers)
            assert window.memory.closed == (not still_open)  # type: ignore[attr-defined]
        assert all(writer.closed == 1 for writer in writers)
    print(dict(reached))
    ways = ("the same again", "after a death", "after a word", "not that of a living")
    assert min(reached[k] for k in ways) > 50


def test_a_spare_window_is_made_once() -> None:
    made: list[DeviceWindow] = []

    def make() -> DeviceWindow:
        if len(made) == 2:
            raise DeviceError("out of memory")
        made.append(DeviceWindow(FakeMemory(), [], FakeMemory()))
        return made[-1]

    windows = DeviceWindows(make)
    for _ in range(3):
        windows.prepare()
    assert len(made) == 1, "unauthenticated peers must cost one window in total"
    assert windows.take(FakeWriter(1, set())) is made[0]
    windows.prepare()
    assert windows.take(FakeWriter(2, set())) is made[1]
    with pytest.raises(DeviceError, match="out of memory"):
        windows.prepare()


class ClosesLate(FakeWriter):
    """A writer that reports its window as closed after some queries."""

    def __init__(self, times: int) -> None:
        super().__init__(1, set())
        self._times = times

    def gone(self) -> bool:
        self._times -= 1
        return self._times < 0


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_window_that_is_open_in_another_process_is_not_freed(
    when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its writer closes it soon or never; in the second case it remains until the process ends."""
    monkeypatch.setattr(windows_module, "CLOSE_S", 0.05)
    for writer, freed in ((ClosesLate(3), 1), (FakeWriter(2, set()), 0)):
        windows = DeviceWindows(lambda: DeviceWindow(FakeMemory(), [], FakeMemory()))
        window = windows.take(writer)
        if when == "before":
            windows.give_back(window)
        windows.close()
        if when == "after":
            windows.give_back(window)
        assert window.memory.closed == freed  # type: ignore[attr-defined]
        assert writer.closed == 1
    assert "processes [2] still have a window open" in caplog.text
