"""A supervisor of child processes: restarts those that die, and stops all in order.

It uses one thread and does not poll: it sleeps until a child reports, a child dies, a restart is
due or a signal arrives. When `stop` returns, all children have ended.

A child is forked by the fork server if that imports the child's module, so that all such children
and their restarts share one import. Other children are spawned, and so is a child that cannot be
forked.
"""

import json
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any

from pdserve.cli.up.child import (
    MAX_REPORT_BYTES,
    SIGNALS,
    ForkedProcess,
    ForkServer,
    Task,
    child_main,
)
from pdserve.services.common.options import ECHO_S

log = logging.getLogger(__name__)
SOON_S = 10.0  # a child that dies again within this time is restarted with a delay
MAX_DELAY_S = 30.0


class StartError(Exception):
    """Raised if a child process could not start, or ended before it was ever ready."""


def restart_delay(deaths_in_a_row: int) -> float:
    """Return how many seconds to wait before a child that has died is restarted. `deaths_in_a_row`
    includes the latest death."""
    return 0.0 if deaths_in_a_row <= 1 else min(MAX_DELAY_S, 2.0 ** (deaths_in_a_row - 2))


@dataclass(slots=True)
class Child:
    """A supervised child process, and the history of its starts and deaths. `make` makes the task
    that it runs; it is called at each start."""

    name: str
    make: Callable[[], Task]
    once: bool = False  # it ends by itself, and is not restarted
    process: SpawnProcess | ForkedProcess | None = None
    pipe: Connection | None = None
    started_at: float = 0.0
    ready: bool = False
    was_ready: bool = False
    deaths_in_a_row: int = 0
    restarts: int = 0
    restart_at: float | None = None
    failure: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


# Called with the child, the event (one it reports, or "died" or "restart"), and its figures.
OnEvent = Callable[[Child, str, dict[str, Any]], None]


def death_of(child: Child, code: int | None) -> str:
    """Describe how a child has died, as text for the user; `code` is its exit code, None if it
    could not be started."""
    exit_text = "" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{f'ended ({exit_text})' if exit_text else 'could not start:'} {child.failure}".rstrip()


class Supervisor:
    """Keeps child processes running. A context manager for the main thread; while it is open, it
    handles this process's signals. A child's report "shutdown" has the effect of SIGTERM."""

    def __init__(
        self,
        on_event: OnEvent,
        preload: Sequence[str] = (),
        serving: Callable[[], bool] = lambda: False,
        reloading: Collection[str] = (),
    ) -> None:
        """`preload` names the modules that the fork server imports, whose tasks are forked. A child
        that ends before it was ever ready ends the system, unless `serving()` is true. SIGHUP is
        forwarded to the children named in `reloading`; if there are none, it stops the system like
        SIGTERM."""
        self._on_event = on_event
        self._reloading = reloading
        self._hangup_pending = False  # a SIGHUP is not forwarded yet
        self._serving = serving
        self._context = multiprocessing.get_context("spawn")
        self._fork_server = ForkServer(preload)
        self.children: list[Child] = []
        self.signals: list[int] = []
        self._signalled_at = -ECHO_S

    def __enter__(self) -> "Supervisor":
        self._wake, self._waker = socket.socketpair()
        for end in (self._wake, self._waker):
            end.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        if self._fork_server.modules:
            self._fork_server.start()  # it imports meanwhile
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.kill()
            self._fork_server.kill()
        finally:
            for number, handler in self._old.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._old_fd)
            self._wake.close()
            self._waker.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self._reloading:
            self._hangup_pending = True
            return
        now = time.monotonic()
        if now - self._signalled_at >= ECHO_S:
            self.signals.append(number)
            self._signalled_at = now

    def start(self, name: str, make: Callable[[], Task]) -> Child:
        """Start a child process, and restart it whenever it dies. Raises StartError if it cannot be
        started now."""
        return self._start(Child(name, make))

    def _start(self, child: Child) -> Child:
        try:
            self._launch(child)
        except OSError as error:
            raise StartError(f"{child.name} could not start: {error}") from error
        self.children.append(child)
        return child

    def run(self, name: str, make: Callable[[], Task]) -> dict[str, Any]:
        """Run a task in a child process to its end; return the figures that it has reported. At a
        signal, return at once, with the figures so far. Raises StartError with the task's message
        if it fails."""
        child = self._start(Child(name, make, once=True))
        self.run_until(lambda: child.process is None)
        if child.process is None:
            self.children.remove(child)
        if child.failure:
            raise StartError(child.failure)
        return child.figures

    def _launch(self, child: Child) -> None:
        """Start the process of a child. Raises OSError if the operating system cannot start one
        now."""
        child.started_at = time.monotonic()
        child.ready, child.failure, child.restart_at = False, "", None
        task = child.make()
        parent_end, child_end = self._context.Pipe(duplex=False)
        with child_end:
            try:
                child.process = self._fork(child.name, task, child_end) or self._spawn(
                    child.name, task, child_end
                )
            except OSError:
                parent_end.close()
                raise
        child.pipe = parent_end

    def _fork(self, name: str, task: Task, pipe: Connection) -> ForkedProcess | None:
        """Have the fork server fork a child that runs the task; return None if the fork server does
        not import the task's module or cannot fork."""
        if task.entry.partition(":")[0] not in self._fork_server.modules:
            return None
        try:
            return self._fork_server.fork(name, task, pipe)
        except OSError as error:
            log.warning("%s is spawned, since it could not be forked: %s", name, error)
            return None

    def _spawn(self, name: str, task: Task, pipe: Connection) -> SpawnProcess:
        process = self._context.Process(
            target=child_main, args=(name, task, os.getpid(), pipe), name=name
        )
        process.start()
        return process

    def run_until(self, done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Watch and restart children until `done()` is true or a signal arrives. Returns False if
        that takes longer than `timeout_s`, otherwise True.

        Raises StartError if a child ends before it was ever ready, unless `serving()` is true.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not done() and not self.signals:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return False
            self._wait_for_events(deadline)
            self._restart_due()
        return True

    def _wait_for_events(self, deadline: float | None) -> None:
        """Sleep until a child reports or dies, a signal arrives, a restart is due or the deadline
        passes; then process reports and deaths."""
        restart_times = [c.restart_at for c in self.children if c.restart_at is not None]
        wake_at = min([*restart_times, *([] if deadline is None else [deadline])], default=None)
        sources: list[Any] = [self._wake]
        sources += [c.pipe for c in self.children if c.pipe]
        sources += [c.process.sentinel for c in self.children if c.process]
        ready = wait(sources, None if wake_at is None else max(0.0, wake_at - time.monotonic()))
        if self._wake in ready:
            self._wake.recv(4096)
        if self._hangup_pending:
            self._hangup_pending = False
            self._forward_hangup()
        for child in self.children:
            if child.pipe in ready:
                self._read(child)
            if child.process and child.process.sentinel in ready:
                self._reap(child)

    def _forward_hangup(self) -> None:
        """Forward SIGHUP to the ready children that reload their API keys. Others may not handle
        SIGHUP, and it would kill them."""
        for child in self.children:
            if child.name in self._reloading and child.ready and child.process:
                if isinstance(child.process, ForkedProcess):
                    child.process.send_signal(signal.SIGHUP)
                elif child.process.pid is not None:
                    os.kill(child.process.pid, signal.SIGHUP)

    def _read(self, child: Child) -> None:
        """Read and process all pending reports of a child. Close its pipe if the child has closed
        it or a report is malformed."""
        while child.pipe:
            try:
                if not child.pipe.poll():
                    return
                event, figures = json.loads(child.pipe.recv_bytes(MAX_REPORT_BYTES))
            except (EOFError, OSError, ValueError):
                child.pipe.close()
                child.pipe = None
                return
            if event == "ready":
                child.ready = child.was_ready = True
            elif event == "shutdown" and not self.signals:
                self.signals.append(signal.SIGTERM)
            elif event == "failed":
                child.failure = str(figures.get("message", ""))
            child.figures.update(figures)
            self._on_event(child, event, figures)

    def _reap(self, child: Child) -> None:
        assert child.process is not None
        self._read(child)  # last reports
        child.process.join()
        code = child.process.exitcode
        child.process.close()
        child.process, child.ready = None, False
        if child.pipe:
            child.pipe.close()
            child.pipe = None
        self._record_death(child, code)

    def _record_death(self, child: Child, code: int | None) -> None:
        """Record a child's death, plan its restart, and report the event."""
        if child.once:
            if code != 0 and not child.failure:
                child.failure = f"{child.name} {death_of(child, code)}"
            return
        lived_s = time.monotonic() - child.started_at
        child.deaths_in_a_row = 1 + (child.deaths_in_a_row if lived_s < SOON_S else 0)
        restart_s = restart_delay(child.deaths_in_a_row)
        child.restart_at = time.monotonic() + restart_s
        self._on_event(child, "died", {"code": code, "lived_s": lived_s, "restart_s": restart_s})

    def _restart_due(self) -> None:
        for child in self.children:
            if child.restart_at is None or self.signals:
                continue
            if not child.was_ready and not self._serving():
                raise StartError(f"{child.name} could not start: {child.failure or 'see above'}")
            if child.restart_at <= time.monotonic():
                child.restarts += 1
                self._on_event(child, "restart", {})
                try:
                    self._launch(child)
                except OSError as error:
                    child.failure = str(error)
                    self._record_death(child, None)

    def stop(self, stages: Sequence[Sequence[Child]], bound_s: float) -> bool:
        """Stop the children, one stage after the other: send SIGTERM to all of a stage and wait
        until they have ended. Children that still run after `bound_s` are killed.

        Another signal kills them at once. Returns whether all children ended without being killed.
        """
        deadline = time.monotonic() + bound_s
        num_signals = len(self.signals)
        for stage in stages:
            for child in stage:
                if child.process:
                    child.process.terminate()
            while any(child.process for child in stage):
                if len(self.signals) > num_signals or time.monotonic() >= deadline:
                    return not self.kill()
                self._wait_for_events(deadline)
                for child in self.children:
                    child.restart_at = None
        return not self.kill()

    def kill(self) -> int:
        """Send SIGKILL to every running child, and wait for its end; return the number of these
        children."""
        running = [child for child in self.children if child.process]
        for child in running:
            assert child.process is not None
            child.process.kill()
        for child in running:
            self._reap(child)
            child.restart_at = None
        return len(running)
