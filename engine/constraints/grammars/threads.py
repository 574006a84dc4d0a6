"""A thread pool in which tenants take turns, and the computation of the next grammar bitmasks in
it.
"""

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
    """Work for one thread; it keeps its own result."""

    def run(self) -> None: ...


T = TypeVar("T", bound=PoolTask)


class FairThreadPool(Generic[T]):
    """Thread pool that runs urgent tasks first, then one task of each tenant in turn.

    Tasks of a tenant run in arrival order. `add` runs nothing yet: each thread that `start` begins
    runs tasks until none waits. Any thread may call any method.
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
        """Number of urgent tasks that wait."""
        return len(self._urgent)

    @property
    def num_waiting(self) -> int:
        """Number of other tasks that wait, over all tenants."""
        return self._num_waiting

    def num_of_tenant(self, tenant: bytes) -> int:
        """Return how many non-urgent tasks of this tenant wait."""
        with self._lock:
            return len(self._queues.get(tenant, ()))

    def add(self, task: T, tenant: bytes) -> None:
        """Queue a task for the tenant's turn."""
        with self._lock:
            self._queues.setdefault(tenant, deque()).append(task)
            self._num_waiting += 1

    def add_urgent(self, task: T) -> None:
        """Queue a task ahead of all that are not urgent."""
        self._urgent.append(task)  # atomic, and cheap enough for each row of a step

    def start(self, count: int) -> None:
        """Start `count` threads, or as many as do not run yet."""
        if not count:
            return
        with self._lock:
            count = min(count, self._num_threads - self._num_running)
            self._num_running += count
        for _ in range(count):
            self._executor.submit(self._work)

    def remove(self, task: T) -> bool:
        """Remove a task that is not urgent; return False if it no longer waits."""
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
        """End the threads after their current tasks; return the tasks that will not run."""
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
                log.exception("a task failed")

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
    """A task that computes one mask."""

    @property
    def is_slow(self) -> bool:
        """Whether the task is known to take long."""

    def run(self) -> None: ...


class MaskThreads:
    """Threads for mask tasks; `add` collects and `start` starts them, once per step.

    Tasks that a step waits for come first, the others by tenants in turn. Tasks stuck behind a slow
    one at the next `start` get other threads. Only one thread may call methods other than `notify`.
    """

    def __init__(self) -> None:
        self._quick = FairThreadPool[MaskTask](NUM_THREADS, "masks")
        self._slow = FairThreadPool[MaskTask](NUM_SLOW_THREADS, "slow-masks")
        self._num_new = 0  # awaited tasks added since the last start
        self._mask_ready = threading.Condition()
        self._is_waiting = False

    def add(self, task: MaskTask, tenant: bytes, *, awaited: bool) -> None:
        """Add a task; `awaited`: the next step waits for it, so it should be fast."""
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
        """Signal, on a mask thread, that a mask is ready; nearly free while no step waits."""
        if self._is_waiting:
            with self._mask_ready:
                self._mask_ready.notify_all()

    def wait(self, is_ready: Callable[[], bool], until_s: float) -> bool:
        """Wait for a mask until a perf_counter time; return whether it is ready."""
        with self._mask_ready:
            self._is_waiting = True  # before the first look, so that `notify` cannot be missed
            try:
                return self._mask_ready.wait_for(is_ready, max(0.0, until_s - time.perf_counter()))
            finally:
                self._is_waiting = False

    def close(self) -> None:
        self._quick.close()
        self._slow.close()
