"""The child processes of `pdserve up`: the first code that runs in them, and the fork server, a
process that imports the modules that several children need and then forks the children.

A child's first code runs before torch is imported. It sets the child's cores and thread counts, and
makes the child die with its parent. The child reports its status to `pdserve up` as JSON over a
pipe.

Python's multiprocessing has a fork server that listens at a path, imports from the current
directory and lives as long as its last child. This one instead is reached by a pipe and ends with
its parent, and its children end with it. It has a single thread, because a fork keeps only the
calling thread: modules that it imports must not start threads.
"""

import importlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn
from urllib.parse import quote

from pdserve.cli.up.cores import Share, take
from pdserve.services.common.logs import keep_log
from pdserve.services.common.process import die_with, show_as

MAX_REPORT_BYTES = 64 << 10  # largest report that the parent accepts
MAX_MESSAGE = 4000
LOG_SUFFIX = ".log"
MAX_FILE_NAME = 200  # bytes
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_CODE_BYTES = 16
ANSWER_S = 60.0  # limit for the imports and a fork
STATUS_S = 5.0  # limit for receiving the exit code of a child that has ended

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Task:
    """What a child process runs: `entry` names a function as "module:function", which is called as
    `function(*args, report=...)` and returns the exit code. The child's last log lines are also
    written to `log_folder`."""

    entry: str
    args: tuple[Any, ...]
    share: Share | None = None
    log_folder: str = ""


def child_main(name: str, task: Task, parent: int, pipe: Connection) -> NoReturn:
    """Run the task as the main function of a new child process; `parent` is the parent's pid.
    Raises SystemExit with the exit code."""
    # Ctrl-C in a terminal must reach only the parent, which stops its children in order.
    os.setpgid(0, 0)
    die_with(parent)
    show_as(name)
    report = reporter(pipe)
    try:
        if task.log_folder:
            file_name = quote(name, safe=" ")[:MAX_FILE_NAME] + LOG_SUFFIX
            keep_log(Path(task.log_folder, file_name))
        if task.share:
            take(task.share)
        code = resolve_name(task.entry)(*task.args, report=report)
    except Exception as error:
        public = type(error).__module__.startswith("pdserve.") or isinstance(error, OSError)
        if not public:
            log.exception("unexpected failure")
        text = str(error) if public and str(error) else f"{type(error).__name__}: {error}"
        report("failed", {"message": text[:MAX_MESSAGE]})
        code = 1
    sys.exit(code)


def reporter(pipe: Connection) -> Callable[[str, dict[str, Any]], None]:
    """Make a thread-safe function that sends a child's reports over the pipe to its parent. It does
    nothing once the parent has died."""
    lock = threading.Lock()

    def report(event: str, figures: dict[str, Any]) -> None:
        data = json.dumps([event, figures], default=str).encode()
        with lock:
            try:
                pipe.send_bytes(data)
            except OSError:
                log.debug("the parent process has ended; dropped the report %s for it", event)

    return report


class ForkedProcess:
    """A child that the fork server has forked, with the methods of a process that the supervisor
    uses. Signals are sent by its pidfd, because its pid may belong to another process once the fork
    server has reaped the child."""

    def __init__(self, pid: int, pidfd: int, status: int) -> None:
        self.pid = pid
        self.sentinel = pidfd  # readable when it has ended
        self.exitcode: int | None = None
        self._status = status  # pipe for the exit code; stays empty if the fork server has died

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, number)

    def join(self) -> None:
        """Wait until the child has ended, and set `exitcode`."""
        wait([self.sentinel])
        has_status = wait([self._status], STATUS_S)
        code = os.read(self._status, MAX_CODE_BYTES) if has_status else b""
        # If the server has died, the kernel has killed its children (process.die_with).
        self.exitcode = int(code) if code else -signal.SIGKILL

    def close(self) -> None:
        os.close(self.sentinel)
        os.close(self._status)


class ForkServer:
    """The supervisor's client of the fork server process. It starts that process at the first fork,
    and again if it has died. Not thread-safe."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = frozenset(modules)
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None

    def fork(self, name: str, task: Task, pipe: Connection) -> ForkedProcess:
        """Have the fork server fork a child that runs the task. The first call waits until the
        server has imported its modules. Raises OSError if the server has died, does not respond or
        cannot fork."""
        server, server_pid = self.start()
        status, status_writer = os.pipe()
        try:
            server.send((name, task))
            for fd in (pipe.fileno(), status_writer):
                send_handle(server, fd, server_pid)
            if not server.poll(ANSWER_S):
                raise TimeoutError(f"the fork server does not respond within {ANSWER_S:g} s")
            reply = server.recv()
            pidfd = -1 if isinstance(reply, str) else recv_handle(server)
        except BaseException as error:
            self.kill()  # the server may be waiting for the rest of a message
            os.close(status)
            if isinstance(error, EOFError | OSError | RuntimeError):
                raise OSError(str(error) or "the fork server has died") from error
            raise
        finally:
            os.close(status_writer)
        if isinstance(reply, str):
            os.close(status)
            raise OSError(reply)
        return ForkedProcess(reply, pidfd, status)

    def kill(self) -> None:
        """Kill the fork server process, and with it the children that it has forked."""
        if self._process is not None and self._pipe is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
            self._pipe.close()
        self._pipe = self._process = None

    def start(self) -> tuple[Connection, int]:
        """Start the fork server process unless it runs; return the pipe to it and its pid."""
        if self._process is None or self._pipe is None or not self._process.is_alive():
            self.kill()
            pipe, server_pipe = multiprocessing.Pipe()
            with server_pipe:
                process = multiprocessing.get_context("spawn").Process(
                    target=serve,
                    args=(server_pipe, sorted(self.modules), os.getpid()),
                    name="fork server",
                )
                process.start()
            self._process, self._pipe = process, pipe
        assert self._process.pid is not None  # started
        return self._pipe, self._process.pid


def serve(requests: Connection, modules: Sequence[str], parent: int) -> None:
    """Run the fork server process: import the modules, then fork a child for each request.

    Blocks SIGNALS, since if they ended this process, its children would die before they have
    drained. In a child, raises SystemExit, so that the child ends like one that multiprocessing has
    spawned.
    """
    os.setpgid(0, 0)
    die_with(parent)
    show_as("fork server")
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy would start threads
    for module in modules:
        with suppress(Exception):  # the child that needs the module reports the error
            importlib.import_module(module)
    server = os.getpid()
    running: dict[int, tuple[int, int]] = {}  # pidfd -> (pid, pipe for the exit code)
    while True:
        for ready in wait([requests, *running]):
            if isinstance(ready, int):
                _reap(ready, *running.pop(ready))
                continue
            try:
                request = requests.recv_bytes()
                pipe, status = (recv_handle(requests) for _ in range(2))
            except (EOFError, ConnectionError):
                return
            try:
                pid = os.fork()
            except OSError as error:
                requests.send(str(error))
                os.close(status)
            else:
                if not pid:
                    requests.close()
                    for fd in (status, *running, *(other for _, other in running.values())):
                        os.close(fd)
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
                    name, task = ForkingPickler.loads(request)
                    child_main(name, task, server, Connection(pipe, readable=False))
                pidfd = os.pidfd_open(pid)
                running[pidfd] = pid, status
                requests.send(pid)
                send_handle(requests, pidfd, parent)
            os.close(pipe)


def _reap(pidfd: int, pid: int, status: int) -> None:
    """Reap a child that has ended, send its exit code to the supervisor, and close its file
    descriptors."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(BrokenPipeError):
        os.write(status, b"%d" % code)
    os.close(status)
    os.close(pidfd)
