"""What a process tells the kernel about itself. Linux only."""

import atexit
import ctypes
import gc
import os
import resource
import signal
from collections.abc import Collection, Iterable

from setproctitle import setproctitle

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
GRPC_POLLER = "-event_engine_listener,-event_engine_client"
NEW_OBJECTS = 10_000  # until the garbage collector looks at them; Python's default is 700


def die_with(parent: int) -> None:
    """The kernel kills this process when its parent dies, so that no orphan is left."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def show_as(name: str) -> None:
    """Names this process for ps and top, e.g. "decode 0"; top cuts it to 15 bytes."""
    setproctitle(f"pdserve {name}")
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def freeze_heap() -> None:
    """Objects made so far are never collected, not even as cycles, and later ones are looked at
    less often. A full collection takes 0.1 s in a loaded worker, and nobody is served then."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # the process ends in order, and the kernels find nothing left
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])


def use_grpc_poller() -> None:
    """To be called before gRPC is imported, by a router of its own: it reads thousands of small
    messages a second. gRPC's event engine wakes four threads for one, its older poller a single
    thread (docs/decisions/routing.md). A gRPC that does not know the name only logs that."""
    os.environ.setdefault("GRPC_EXPERIMENTS", GRPC_POLLER)


def raise_open_files() -> None:
    """Lets this process open as many files and sockets as the system grants (`ulimit -Hn`)."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def hide_arguments(words: Iterable[str], secret_flags: Collection[str]) -> None:
    """Writes the command line anew, as ps shows it to everybody, without the values of the flags.

    `words` are those after the program's name, `secret_flags` like "--api-key".
    """
    shown, hide = [], False
    for word in words:
        flag, equals, _ = word.partition("=")
        if hide:
            word = "***"
        elif equals and flag in secret_flags:
            word = f"{flag}=***"
        hide = not hide and not equals and flag in secret_flags
        shown.append(word)
    setproctitle(" ".join(("pdserve", *shown)))
