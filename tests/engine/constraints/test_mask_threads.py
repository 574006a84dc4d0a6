"""Which mask is computed when: those that a step waits for first, and none behind a slow one."""

import threading
from collections.abc import Iterator

import pytest

from pdserve.engine.constraints.grammars.mask_threads import NUM_THREADS, MaskThreads

LIMIT_S = 30.0


class Task:
    """Notes that it has run; a slow one, which is not known to be slow, takes until it is
    released."""

    is_slow = False

    def __init__(self, ran: list["Task"], slow: bool = False) -> None:
        self._ran = ran
        self.begun, self.release, self.done = (threading.Event() for _ in range(3))
        if not slow:
            self.release.set()

    def run(self) -> None:
        self.begun.set()
        assert self.release.wait(LIMIT_S)
        self._ran.append(self)
        self.done.set()


@pytest.fixture
def threads() -> Iterator[MaskThreads]:
    threads = MaskThreads()
    yield threads
    threads.close()


def test_one_call_begins_all_tasks(threads: MaskThreads) -> None:
    ran: list[Task] = []
    tasks = [Task(ran) for _ in range(40)]
    for i, task in enumerate(tasks):
        threads.add(task, awaited=i % 3 > 0)
    threads.start()
    assert all(task.done.wait(LIMIT_S) for task in tasks)


def test_what_is_behind_a_slow_task_gets_another_thread(threads: MaskThreads) -> None:
    ran: list[Task] = []
    slow, quick = Task(ran, slow=True), Task(ran)
    threads.add(slow, awaited=True)
    threads.add(quick, awaited=True)
    threads.start()
    assert slow.begun.wait(LIMIT_S)
    threads.start()  # as after a step that has waited in vain
    assert quick.done.wait(LIMIT_S)
    assert not slow.done.is_set()
    slow.release.set()


def test_what_is_behind_two_slow_tasks_gets_a_thread_too(threads: MaskThreads) -> None:
    """The second of them takes the thread that the next start begins, and no other start comes."""
    ran: list[Task] = []
    first, second, quick = Task(ran, slow=True), Task(ran, slow=True), Task(ran)
    for task in (first, second, quick):
        threads.add(task, awaited=True)
    threads.start()
    assert first.begun.wait(LIMIT_S)
    assert not second.begun.is_set()
    threads.start()
    assert quick.done.wait(LIMIT_S)
    assert second.begun.wait(LIMIT_S)
    assert ran == [quick]
    first.release.set()
    second.release.set()


def test_what_a_step_waits_for_comes_first(threads: MaskThreads) -> None:
    ran: list[Task] = []
    slow = [Task(ran, slow=True) for _ in range(NUM_THREADS)]
    for task in slow:
        threads.add(task, awaited=False)
    threads.start()
    assert all(task.begun.wait(LIMIT_S) for task in slow)
    other, awaited = Task(ran), Task(ran)
    threads.add(other, awaited=False)
    threads.add(awaited, awaited=True)
    threads.start()
    slow[0].release.set()
    assert other.done.wait(LIMIT_S)
    assert ran == [slow[0], awaited, other]
    for task in slow:
        task.release.set()
