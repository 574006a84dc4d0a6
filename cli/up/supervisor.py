"""A supervisor that keeps a set of child processes alive and ends them in order.

It uses one thread and does not poll: it sleeps until a child reports, a child dies, a restart is
due or a signal arrives. All its children have ended when `stop` returns.

A child is forked if the fork server imports its module, so that all children and their restarts
share one import. Other children are spawned, and so is a child that cannot be forked.
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
    """A child process could not start, or ended before it was ever ready."""


def restart_delay(deaths_in_a_row: int) -> float:
    """Return the seconds until a restart. `deaths_in_a_row` includes the current death."""
    return 0.0 if deaths_in_a_row <= 1 else min(MAX_DELAY_S, 2.0 ** (deaths_in_a_row - 2))


@dataclass(slots=True)
class Child:
    """A child process with the record of its starts and deaths. `make` builds its task at each
    start."""

    name: str
    make: Callable[[], Task]
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
    """Describe the death of a child in words; without a code, it could not start."""
    exit_text = "" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{f'ended ({exit_text})' if exit_text else 'could not start:'} {child.failure}".rstrip()


class Supervisor:
    """A context manager for the main thread that owns the process's signals while it is open."""

    def __init__(
        self,
        on_event: OnEvent,
        preload: Sequence[str] = (),
        serving: Callable[[], bool] = lambda: False,
        reloading: Collection[str] = (),
    ) -> None:
        """`preload` names the modules of tasks to fork. Once `serving()` is true, a child that ends
        before it was ever ready does not end the system. SIGHUP is forwarded to the children named
        in `reloading`; if there are none, it stops the system like SIGTERM."""
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
        """Start a child and keep it alive from now on. Raises StartError if it cannot start."""
        child = Child(name, make)
        try:
            self._launch(child)
        except OSError as error:
            raise StartError(f"{name} could not start: {error}") from error
        self.children.append(child)
        return child

    def _launch(self, child: Child) -> None:
        """Start the child's process. Raises OSError if the system cannot start one now."""
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
        """Fork the child; return None if its module is not preloaded or the fork fails."""
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
        """Watch and restart children until `done()` or a signal; return False on timeout.

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
        """Sleep until a child, a signal, a due restart or the deadline; then record the events."""
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
        """Forward SIGHUP to ready children that reload; others may lack a handler and would die."""
        for child in self.children:
            if child.name in self._reloading and child.ready and child.process:
                if isinstance(child.process, ForkedProcess):
                    child.process.send_signal(signal.SIGHUP)
                elif child.process.pid is not None:
                    os.kill(child.process.pid, signal.SIGHUP)

    def _read(self, child: Child) -> None:
        """Read the pending reports of a child; close the pipe at its end or on a malformed one."""
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
        """Record a death and plan the restart."""
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
        """Send SIGTERM to each stage in turn and wait for it; kill the rest after `bound_s`.

        A further signal kills at once. Returns whether all children ended by themselves.
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
        """Send SIGKILL to every running child; return their number."""
        running = [child for child in self.children if child.process]
        for child in running:
            assert child.process is not None
            child.process.kill()
        for child in running:
            self._reap(child)
            child.restart_at = None
        return len(running)
