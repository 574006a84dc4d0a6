"""A thread pool in which tenants take turns, and the threads that compute the next bitmasks of
grammars."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

log = logging.getLogger(__name__)
NUM_THREADS = 4  # so that a few slow grammars leave threads for others
NUM_SLOW_THREADS = 2  # extra threads for tasks known to be slow
# Most masks take microseconds, less than waking a thread: one thread computes several masks.
TASKS_PER_THREAD = 16


class PoolTask(Protocol):
    """Task for a thread of the pool. `run` does the work and stores the result in the task
    itself."""

    def run(self) -> None: ...


T = TypeVar("T", bound=PoolTask)


class FairThreadPool(Generic[T]):
    """Thread pool that runs urgent tasks first, then one task of each tenant in turn.

    Tasks of one tenant run in the order of their arrival. `add` and `add_urgent` only queue a task;
    `start` makes threads run queued tasks until none is left. Any thread may call any method.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, name)
        self._lock = threading.Lock()
        self._urgent: deque[T] = deque()
        self._queues: dict[bytes, deque[T]] = {}  # the next tenant first; none is empty
        self._num_waiting = 0  # tasks in all queues
        self._num_running = 0  # started threads that still look for tasks

    @property
    def num_urgent(self) -> int:
        """Number of queued urgent tasks."""
        return len(self._urgent)

    @property
    def num_waiting(self) -> int:
        """Number of queued tasks that are not urgent, over all tenants."""
        return self._num_waiting

    def num_of_tenant(self, tenant: bytes) -> int:
        """Return the number of queued tasks of this tenant that are not urgent."""
        with self._lock:
            return len(self._queues.get(tenant, ()))

    def add(self, task: T, tenant: bytes) -> None:
        """Queue a task, which runs when its tenant's turn comes."""
        with self._lock:
            self._queues.setdefault(tenant, deque()).append(task)
            self._num_waiting += 1

    def add_urgent(self, task: T) -> None:
        """Queue an urgent task, which runs before all tasks that are not urgent."""
        self._urgent.append(task)  # atomic, and cheap enough for each row of a step

    def start(self, count: int) -> None:
        """Make up to `count` more threads run queued tasks, as far as the pool has idle threads."""
        if not count:
            return
        with self._lock:
            count = min(count, self._num_threads - self._num_running)
            self._num_running += count
        for _ in range(count):
            self._executor.submit(self._work)

    def remove(self, task: T) -> bool:
        """Remove a task that is not urgent from the queue; return False if it is not queued any
        more."""
        with self._lock:
            for tenant, queue in self._queues.items():
                if task in queue:
                    queue.remove(task)
                    self._num_waiting -= 1
                    if not queue:
                        del self._queues[tenant]
                    return True
        return False

    def close(self) -> list[T]:
        """Stop the threads after their current tasks; return the queued tasks, which will not
        run."""
        with self._lock:
            unfinished = [
                *self._urgent,
                *(task for queue in self._queues.values() for task in queue),
            ]
            self._urgent.clear()
            self._queues.clear()
            self._num_waiting = 0
        self._executor.shutdown(wait=False, cancel_futures=True)
        return unfinished

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                task.run()
            except BaseException:  # a panic is not an Exception
                log.exception("a grammar task raised an error; its thread continues")

    def _next(self) -> T | None:
        with self._lock:
            if self._urgent:
                return self._urgent.popleft()
            if not self._queues:
                self._num_running -= 1  # under the lock, so that `start` replaces this thread
                return None
            tenant = next(iter(self._queues))
            queue = self._queues.pop(tenant)
            task = queue.popleft()
            self._num_waiting -= 1
            if queue:
                self._queues[tenant] = queue  # behind the others
            return task


class MaskTask(Protocol):
    """Task that computes one bitmask of a grammar."""

    @property
    def is_slow(self) -> bool:
        """Whether the task probably takes long, so that it gets a separate thread pool."""

    def run(self) -> None: ...


class MaskThreads:
    """Threads that compute the bitmasks of grammars. `add` queues tasks, and `start` lets the
    threads run them, once per step.

    Tasks that a step waits for run first, the others in turn by tenant. A task that has not begun
    by the next `start` is stuck behind a slow one and gets another thread. Only one thread may call
    the methods other than `notify`.
    """

    def __init__(self) -> None:
        self._quick = FairThreadPool[MaskTask](NUM_THREADS, "masks")
        self._slow = FairThreadPool[MaskTask](NUM_SLOW_THREADS, "slow-masks")
        self._num_new = 0  # awaited tasks added since the last start
        self._mask_ready = threading.Condition()
        self._is_waiting = False

    def add(self, task: MaskTask, tenant: bytes, *, awaited: bool) -> None:
        """Queue a mask task; `awaited`: the next step waits for the mask, so the task runs
        first."""
        if task.is_slow:
            self._slow.add(task, tenant)
        elif awaited:
            self._num_new += 1
            self._quick.add_urgent(task)
        else:
            self._quick.add(task, tenant)

    def start(self) -> None:
        # A task not begun since the previous start is behind a slow one: start a thread for each.
        delayed = max(0, self._quick.num_urgent - self._num_new)
        new_threads = -(-self._num_new // TASKS_PER_THREAD)
        self._num_new = 0
        self._quick.start(delayed + new_threads + self._quick.num_waiting)
        self._slow.start(self._slow.num_waiting)

    def notify(self) -> None:
        """Wake the step that waits for masks, because one is ready; called on a mask thread. Costs
        almost nothing while no step waits."""
        if self._is_waiting:
            with self._mask_ready:
                self._mask_ready.notify_all()

    def wait(self, is_ready: Callable[[], bool], until_s: float) -> bool:
        """Wait until a mask is ready, but not beyond the perf_counter time `until_s`; return
        whether it is ready."""
        with self._mask_ready:
            self._is_waiting = True  # before the first look, so that `notify` cannot be missed
            try:
                return self._mask_ready.wait_for(is_ready, max(0.0, until_s - time.perf_counter()))
            finally:
                self._is_waiting = False

    def close(self) -> None:
        self._quick.close()
        self._slow.close()
