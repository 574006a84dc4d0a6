"""Virtual time, and the processes that live in it.

A `Process` is an asyncio event loop whose callbacks wait in the single heap of its `World`, so the
seed determines the order of everything in the cluster. A killed process is a loop that never runs
again: no `finally` block runs. A stopped process is a loop whose callbacks are kept for later.
"""

import asyncio
import contextvars
import heapq
import itertools
from asyncio import events
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from random import Random
from typing import Any

START_S = 1000.0  # clock start: many fields use 0 for "not reached"


class Handle:
    """A callback scheduled for a time."""

    __slots__ = ("_when", "args", "callback", "context", "process", "stopped")

    def __init__(
        self,
        when: float,
        process: "Process",
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> None:
        self.process = process
        self.stopped = False
        self._when = when
        self.callback = callback
        self.args = args
        self.context = contextvars.copy_context() if context is None else context

    def cancel(self) -> None:
        self.stopped = True
        self.callback, self.args = _nothing, ()

    def cancelled(self) -> bool:
        return self.stopped

    def when(self) -> float:
        return self._when


def _nothing(*_: object) -> None:
    pass


class State(Enum):
    RUNNING = "running"
    STOPPED = "stopped"  # SIGSTOP
    DEAD = "dead"


class World:
    """Clock and heap of a simulation."""

    def __init__(self, seed: int | str) -> None:
        self.now = START_S
        self.rng = Random(f"world {seed}")
        self.errors: list[str] = []  # uncaught exceptions
        self.num_callbacks = 0
        self.over = False  # the run has ended; remaining tasks only finish
        self.notes: list[Any] = []  # one per life of a process: notes.py
        self.processes: list[Process] = []
        self._heap: list[tuple[float, int, Handle]] = []
        self._order = itertools.count()

    def at(
        self,
        when: float,
        process: "Process",
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Handle:
        handle = Handle(when, process, callback, args, context)
        due = when if when > self.now else self.now
        heapq.heappush(self._heap, (due, next(self._order), handle))
        return handle

    def after(
        self, delay_s: float, process: "Process", callback: Callable[..., object], *args: Any
    ) -> Handle:
        return self.at(self.now + delay_s, process, callback, *args)

    def run(self, done: Callable[[], bool], until: float) -> bool:
        """Run callbacks until `done()`, which is checked after each, or until the time. Return
        whether it is done."""
        heap, pop, running = self._heap, heapq.heappop, State.RUNNING
        while heap and heap[0][0] <= until:
            when, _, handle = pop(heap)
            if when > self.now:
                self.now = when
            if handle.stopped:
                continue
            process = handle.process
            if process.state is running:
                self._run(handle)
                if done():
                    return True
            else:
                process.kept.append(handle)  # those of dead processes are used only by `close`
        self.now = max(self.now, until)
        return done()

    def _run(self, handle: Handle) -> None:
        self.num_callbacks += 1
        events._set_running_loop(handle.process)
        try:
            handle.context.run(handle.callback, *handle.args)
        except Exception as error:
            self.errors.append(f"{handle.process.name}: {type(error).__name__}: {error}")
        finally:
            events._set_running_loop(None)

    @contextmanager
    def inside(self, process: "Process") -> Iterator[None]:
        """Run the calls of the context in a process."""
        before = events._get_running_loop()
        events._set_running_loop(process)
        try:
            yield
        finally:
            events._set_running_loop(before)

    def resume(self, process: "Process") -> None:
        """Deliver SIGCONT: run the callbacks that came due while stopped, in their order."""
        if process.state is State.STOPPED:
            process.state = State.RUNNING
            kept, process.kept = process.kept, []
            for handle in kept:
                heapq.heappush(self._heap, (self.now, next(self._order), handle))

    def close(self) -> None:
        """End all remaining coroutines, so that the garbage collector ends none."""
        self.over = True
        for process in self.processes:
            process.state = State.STOPPED
            self.resume(process)
        for _ in range(20):
            left = [task for process in self.processes for task in process.tasks]
            if not left:
                return
            for task in left:
                task.cancel()
            while self._heap and self._heap[0][0] <= self.now:
                handle = heapq.heappop(self._heap)[2]
                if not handle.stopped:
                    self._run(handle)
        names = ", ".join(str(task.get_name()) for task in left)
        raise AssertionError(f"tasks do not end: {names}")


class Process(asyncio.AbstractEventLoop):
    """One process of the cluster; its coroutines see it as their event loop."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.state = State.RUNNING
        self.kept: list[Handle] = []  # callbacks that came due while not running
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.connect: Callable[[str], Coroutine[Any, Any, None]] | None = None
        self.on_death: list[Callable[[], None]] = []
        self.service: Any = None  # the service in this process, for the oracle
        self.build: Callable[[], Any] = _nothing  # returns an engine and its card
        self._signals: dict[int, Callable[[], None]] = {}
        world.processes.append(self)

    @property
    def alive(self) -> bool:
        return self.state is not State.DEAD

    def kill(self) -> None:
        """Deliver SIGKILL."""
        if self.alive:
            self.state = State.DEAD
            for act in self.on_death:
                act()

    def signal(self, number: int) -> None:
        """Deliver SIGTERM; without a handler the process ends."""
        if number in self._signals:
            self.call_soon(self._signals[number])
        else:
            self.kill()

    # The parts of AbstractEventLoop that the services use.

    def time(self) -> float:
        return self.world.now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.world.at(self.world.now, self, callback, *args, context=context)

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.world.at(self.world.now, self, callback, *args, context=context)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.world.at(self.world.now + delay, self, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.world.at(when, self, callback, *args, context=context)

    def create_future(self) -> Any:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> Any:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self.tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.world.errors.append(f"{self.name}: {context.get('message')}: {error!r}")

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        self._signals[sig] = partial(callback, *args)

    def remove_signal_handler(self, sig: int) -> bool:
        return self._signals.pop(sig, None) is not None

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """Run the function at once; the functions that services move to threads wait for nothing in
        the simulation."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        """Connect to a port that is probed, or raise what a socket would raise."""
        assert self.connect is not None
        await self.connect(f"{host}:{port}")
        protocol = protocol_factory()
        transport = _Probe(self, protocol)
        protocol.connection_made(transport)
        return transport, protocol


class _Probe(asyncio.Transport):
    """A connection that is only opened and closed."""

    def __init__(self, process: Process, protocol: Any) -> None:
        super().__init__()
        self._process = process
        self._protocol = protocol
        self._closing = False

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._process.call_soon(self._protocol.connection_lost, None)


def here() -> Any:
    """Return the running process."""
    return asyncio.get_running_loop()
