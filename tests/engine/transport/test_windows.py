"""A window has one writer at a time: nobody gets one that a living process may still write into."""

import random
from collections import Counter

import pytest

from pdserve.engine.transport.cuda_ipc.windows import DeviceWindow, DeviceWindows
from pdserve.engine.transport.device import DeviceError


class FakeWriter:
    def __init__(self, pid: int, dead: set[int]) -> None:
        self.pid, self._dead, self.closed = pid, dead, 0

    def exited(self) -> bool:
        return self.pid in self._dead

    def close(self) -> None:
        self.closed += 1


class FakeMemory:
    def __init__(self) -> None:
        self.address, self.size, self.closed = 0, 0, 0

    def handle(self) -> bytes:
        return bytes(64)

    def close(self) -> None:
        self.closed += 1


def test_random_lives() -> None:
    """A process connects, leaves, is frozen (left, but alive) and dies, in any order."""
    reached: Counter[str] = Counter()
    for seed in range(200):
        rng = random.Random(seed)
        made: list[DeviceWindow] = []

        def make(made: list[DeviceWindow] = made) -> DeviceWindow:
            made.append(DeviceWindow(FakeMemory(), [], FakeMemory()))
            return made[-1]

        windows, dead = DeviceWindows(make), set[int]()
        lent: list[tuple[DeviceWindow, FakeWriter]] = []
        last: dict[int, int] = {}  # id of window -> the pid that had it last
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
                assert before is None or before == pid or before in dead
                if before is not None:
                    reached["the same again" if before == pid else "after a death"] += 1
                elif any(p not in dead and p != pid for p in last.values()):
                    reached["not that of a living"] += len(made) > num_made
                last[id(window)] = pid
                lent.append((window, writers[-1]))
            elif act == "leave" and lent:
                windows.give_back(*lent.pop(rng.randrange(len(lent))))
            elif act == "die" and last:
                dead.add(rng.choice(list(last.values())))
            elif act == "prepare":
                windows.prepare()
        windows.close()
        assert not any(window.memory.closed for window, _ in lent)  # type: ignore[attr-defined]
        for window, writer in lent:
            windows.give_back(window, writer)
        windows.close()
        assert all(window.memory.closed == 1 for window in made)  # type: ignore[attr-defined]
        assert all(writer.closed == 1 for writer in writers)
    print(dict(reached))
    assert min(reached[k] for k in ("the same again", "after a death", "not that of a living")) > 50


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
    assert len(made) == 1, "strangers cost one window together"
    assert windows.take(FakeWriter(1, set())) is made[0]
    windows.prepare()
    assert windows.take(FakeWriter(2, set())) is made[1]
    with pytest.raises(DeviceError, match="out of memory"):
        windows.prepare()
