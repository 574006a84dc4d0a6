"""Order of mask computation: masks that a step waits for come first, and no mask waits behind a
slow one."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pdserve.engine.constraints.grammars import MaskThreads
from pdserve.engine.constraints.grammars.threads import NUM_SLOW_THREADS, NUM_THREADS

LIMIT_S = 30.0


class Task:
    """A task that records its run. With `slow`, it blocks until it is released; `is_slow` says
    whether it is known to be slow."""

    def __init__(self, ran: list["Task"], slow: bool = False, is_slow: bool = False) -> None:
        self._ran = ran
        self.is_slow = is_slow
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


def test_one_call_starts_all_tasks(threads: MaskThreads) -> None:
    ran: list[Task] = []
    tasks = [Task(ran) for _ in range(40)]
    for i, task in enumerate(tasks):
        threads.add(task, b"", awaited=i % 3 > 0)
    threads.start()
    assert all(task.done.wait(LIMIT_S) for task in tasks)


def test_tasks_behind_a_slow_task_get_another_thread(threads: MaskThreads) -> None:
    ran: list[Task] = []
    slow, quick = Task(ran, slow=True), Task(ran)
    threads.add(slow, b"", awaited=True)
    threads.add(quick, b"", awaited=True)
    threads.start()
    assert slow.begun.wait(LIMIT_S)
    threads.start()  # as after a step that waited in vain
    assert quick.done.wait(LIMIT_S)
    assert not slow.done.is_set()
    slow.release.set()


def test_tasks_behind_two_slow_tasks_get_a_thread(threads: MaskThreads) -> None:
    """The second slow task occupies the thread that the next start begins, and no further start
    follows."""
    ran: list[Task] = []
    first, second, quick = Task(ran, slow=True), Task(ran, slow=True), Task(ran)
    for task in (first, second, quick):
        threads.add(task, b"", awaited=True)
    threads.start()
    assert first.begun.wait(LIMIT_S)
    assert not second.begun.is_set()
    threads.start()
    assert quick.done.wait(LIMIT_S)
    assert second.begun.wait(LIMIT_S)
    assert ran == [quick]
    first.release.set()
    second.release.set()


def test_awaited_tasks_come_first(threads: MaskThreads) -> None:
    ran: list[Task] = []
    slow = [Task(ran, slow=True) for _ in range(NUM_THREADS)]
    for task in slow:
        threads.add(task, b"", awaited=False)
    threads.start()
    assert all(task.begun.wait(LIMIT_S) for task in slow)
    other, awaited = Task(ran), Task(ran)
    threads.add(other, b"", awaited=False)
    threads.add(awaited, b"", awaited=True)
    threads.start()
    slow[0].release.set()
    assert other.done.wait(LIMIT_S)
    assert ran == [slow[0], awaited, other]
    for task in slow:
        task.release.set()


@pytest.mark.parametrize("is_slow", [False, True])
def test_tenants_take_turns(threads: MaskThreads, is_slow: bool) -> None:
    """A tenant with many tasks that no step waits for does not delay the tasks of others."""
    ran: list[Task] = []
    busy = [Task(ran, True, is_slow) for _ in range(NUM_SLOW_THREADS if is_slow else NUM_THREADS)]
    for task in busy:
        threads.add(task, b"a", awaited=False)
    threads.start()
    assert all(task.begun.wait(LIMIT_S) for task in busy)
    many = [Task(ran, False, is_slow) for _ in range(9)]
    few = [Task(ran, False, is_slow) for _ in range(2)]
    for task in many:
        threads.add(task, b"a", awaited=False)
    for task in few:
        threads.add(task, b"b", awaited=False)
    threads.start()
    busy[0].release.set()
    assert many[-1].done.wait(LIMIT_S)
    assert ran == [busy[0], many[0], few[0], many[1], few[1], *many[2:]]
    for task in busy:
        task.release.set()


def test_busy_threads_get_no_more_tasks_than_they_can_start(
    threads: MaskThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Task] = []
    submitted: list[Any] = []
    submit = ThreadPoolExecutor.submit

    def counted(*args: Any) -> Any:
        submitted.append(args)
        return submit(*args)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", counted)
    busy = [Task(ran, True, is_slow) for is_slow in (False, True) for _ in range(NUM_THREADS)]
    for task in busy:
        threads.add(task, b"", awaited=False)
    later = [Task(ran, False, is_slow) for is_slow in (False, True) for _ in range(50)]
    for task in later:
        threads.add(task, b"", awaited=False)
        threads.start()
    assert len(submitted) == NUM_THREADS + NUM_SLOW_THREADS
    for task in busy:
        task.release.set()
    assert all(task.done.wait(LIMIT_S) for task in later)


def test_a_failing_task_does_not_end_its_thread(threads: MaskThreads) -> None:
    ran: list[Task] = []

    class Broken(Task):
        def run(self) -> None:
            super().run()
            raise SystemExit

    for task in [Broken(ran) for _ in range(2 * NUM_THREADS)]:
        threads.add(task, b"", awaited=False)
        threads.start()
        assert task.done.wait(LIMIT_S)
    last = Task(ran)
    threads.add(last, b"", awaited=True)
    threads.start()
    assert last.done.wait(LIMIT_S)
