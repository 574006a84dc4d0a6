"""A process that has imported what several children need, and forks them.

multiprocessing has one too, but that listens at a path, imports from the current directory and
lives as long as its last child. This one is reached by a socket pair and ends with its parent, and
its children end with it. It has one thread, since a fork keeps no other: no module that it imports
may start one.
"""

import importlib
import multiprocessing
import os
import pickle
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from pdserve.services.local.child import Task, child_main, die_with, show_as

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_REQUEST_BYTES = 1 << 20
MAX_ANSWER_BYTES = 4096


class ForkedProcess:
    """What a supervisor needs of a process. Signals go to the kernel's handle of it (pidfd), since
    its pid may be another's once the fork server has reaped it."""

    def __init__(self, pid: int, pidfd: int, status: int) -> None:
        self.pid = pid
        self.sentinel = pidfd  # readable when it has ended
        self.exitcode: int | None = None
        self._status = status  # its exit code comes here; nothing if the fork server has died

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def join(self) -> None:
        """Wait for its end."""
        wait([self.sentinel])
        code = os.read(self._status, MAX_ANSWER_BYTES)
        self.exitcode = int(code) if code else -signal.SIGKILL  # the kernel's, see die_with

    def close(self) -> None:
        os.close(self.sentinel)
        os.close(self._status)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, number)


class ForkServer:
    """The supervisor's end of it; one thread uses it. The server starts with the first fork, and
    again if it has died."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = frozenset(modules)
        self._process: SpawnProcess | None = None
        self._socket: socket.socket | None = None

    def fork(self, name: str, task: Task, pipe: Connection) -> ForkedProcess:
        """Returns a child that runs the task; the first waits for the imports. Raises OSError if
        the server has died or cannot fork."""
        server = self._start()
        status, theirs = os.pipe()
        try:
            request = pickle.dumps((name, task))
            socket.send_fds(server, [request], [pipe.fileno(), theirs])
            answer, fds, *_ = socket.recv_fds(server, MAX_ANSWER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            if not fds:
                raise OSError(answer.decode() or "the fork server has died")
        except BaseException:
            os.close(status)
            raise
        finally:
            os.close(theirs)
        return ForkedProcess(int(answer), fds[0], status)

    def close(self) -> None:
        """End the server, and with it the children that still run."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.join()
            self._process.close()
        self._socket = self._process = None

    def _start(self) -> socket.socket:
        if self._socket is not None and self._process is not None and self._process.is_alive():
            return self._socket
        self.close()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = multiprocessing.get_context("spawn").Process(
                target=serve, args=(theirs, sorted(self.modules), os.getpid()), name="fork server"
            )
            try:
                self._process.start()
            except OSError:
                self._process = None
                raise
        return self._socket


def serve(requests: socket.socket, modules: Sequence[str], parent: int) -> None:
    """The process itself: imports the modules, then forks until its parent closes the socket.

    A signal to all processes of a service leaves it alone: its children would die before they have
    drained. In a child it returns by SystemExit, so that the child ends as a spawned one does.
    """
    os.setpgid(0, 0)
    die_with(parent)
    show_as("fork server")
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy would start threads
    for module in modules:
        with suppress(Exception):  # whoever needs it will say what is wrong with it
            importlib.import_module(module)
    server = os.getpid()
    running: dict[int, tuple[int, int]] = {}  # pidfd: pid, where its exit code goes
    while True:
        for ready in wait([requests, *running]):
            if isinstance(ready, int):
                pid, status = running.pop(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(BrokenPipeError):
                    os.write(status, b"%d" % code)
                os.close(status)
                continue
            request, fds, *_ = socket.recv_fds(
                requests, MAX_REQUEST_BYTES, 2, socket.MSG_CMSG_CLOEXEC
            )
            if not request:
                return
            name, task = pickle.loads(request)
            pipe, status = fds
            try:
                pid = os.fork()
            except OSError as error:
                requests.send(str(error).encode())
                os.close(pipe)
                os.close(status)
                continue
            if not pid:
                requests.close()
                for fd in (status, *running, *(other for _, other in running.values())):
                    os.close(fd)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
                child_main(name, task, server, Connection(pipe, readable=False))
            os.close(pipe)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid, status
            socket.send_fds(requests, [b"%d" % pid], [pidfd])
