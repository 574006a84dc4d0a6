"""Process attributes set through the kernel (name, signals, limits, heap), and changes of files
while a process runs. Linux only.
"""

import atexit
import ctypes
import gc
import os
import resource
import signal
from collections.abc import Collection, Iterable

from setproctitle import setproctitle

LOOK_AGAIN_S = 2.0  # between two checks of a file
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
GRPC_POLLER = "-event_engine_listener,-event_engine_client"
NEW_OBJECTS = 10_000  # allocations between two garbage collections; Python's default is 700


def stamp(path: str) -> tuple[int, int, int]:
    """A value that changes with the file; zeros if the file is missing."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0, 0
    return status.st_mtime_ns, status.st_size, status.st_ino


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, so that no orphan remains."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def show_as(name: str) -> None:
    """Name this process for ps and top, e.g. "decode 0"; top cuts the name to 15 bytes."""
    setproctitle(f"pdserve {name}")
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def freeze_heap() -> None:
    """Exempt all existing objects from garbage collection, even cycles, and collect later ones less
    often. A full collection takes 0.1 s in a loaded worker, in which no request is served."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else nanobind would report the frozen objects as leaks
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])


def use_grpc_poller() -> None:
    """Select gRPC's older poller; call before gRPC is imported, in a router that runs alone in its
    process. The router reads thousands of small messages a second: gRPC's event engine wakes four
    threads for each, the poller one (docs/decisions/routing.md). A gRPC that does not know the name
    only logs a message."""
    os.environ.setdefault("GRPC_EXPERIMENTS", GRPC_POLLER)


def raise_open_files() -> None:
    """Raise the limit of open files and sockets to the system's maximum (`ulimit -Hn`)."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def hide_arguments(args: Iterable[str], secret_flags: Collection[str]) -> None:
    """Rewrite the command line that ps shows, with the values of the secret flags masked.

    `args` are the arguments after the program's name; `secret_flags` are like "--api-key".
    """
    visible_args, hide_next = [], False
    for arg in args:
        flag, equals, _ = arg.partition("=")
        if hide_next:
            arg = "***"
        elif equals and flag in secret_flags:
            arg = f"{flag}=***"
        hide_next = not hide_next and not equals and flag in secret_flags
        visible_args.append(arg)
    setproctitle(" ".join(("pdserve", *visible_args)))
