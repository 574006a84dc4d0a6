"""A thread pool in which tenants take turns."""

import logging
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

log = logging.getLogger(__name__)


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
