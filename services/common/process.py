"""Changes attributes of this process (name, signal at the parent's death, open files, heap), and
detects changes of files. Linux only.
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
    """Return a value that differs whenever the file has changed: modification time in ns, size,
    inode. Zeros if the file is missing."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0, 0
    return status.st_mtime_ns, status.st_size, status.st_ino


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, so that no orphan remains. `parent`
    is the parent's pid; if that process is already gone, exit now."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def show_as(name: str) -> None:
    """Set the name of this process in ps and top, e.g. "decode 0"; top shows its first 15 bytes."""
    setproctitle(f"pdserve {name}")
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def freeze_heap() -> None:
    """Exempt all existing objects from garbage collection for good, and collect new objects less
    often. A full collection takes 0.1 s in a worker with a loaded model, and stops all its requests
    meanwhile."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else nanobind would report the frozen objects as leaks
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])


def use_grpc_poller() -> None:
    """Have gRPC use its older poller instead of its event engine. Call before gRPC is imported, in
    a process that runs only a router. The router reads thousands of small messages a second, for
    each of which the event engine wakes four threads and the poller one
    (docs/decisions/routing.md). A version of gRPC without this setting only logs a message."""
    os.environ.setdefault("GRPC_EXPERIMENTS", GRPC_POLLER)


def raise_open_files() -> None:
    """Raise this process's limit of open files and sockets to the hard limit (`ulimit -Hn`)."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def hide_arguments(args: Iterable[str], secret_flags: Collection[str]) -> None:
    """Replace the command line that ps shows for this process; the values of secret flags appear as
    ***.

    `args` are the arguments after the program's name; `secret_flags` are flags like "--api-key".
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
