"""The first code that runs in a process which `pdserve up` spawns or forks.

It runs before torch is imported, to set cores and thread counts and to let the process die with its
parent. The child reports its status to `pdserve up` as JSON over a pipe.
"""

import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

from pdserve.cli.up.cores import Share
from pdserve.services.common.logs import keep_log
from pdserve.services.common.process import die_with, show_as

MAX_REPORT_BYTES = 64 << 10  # largest report that the parent accepts
MAX_MESSAGE = 4000
LOG_SUFFIX = ".log"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Task:
    """The function that a child runs: `entry` is "module:function", takes `(*args, report=...)` and
    returns the exit code. `log_folder` also receives the child's last log lines."""

    entry: str
    args: tuple[Any, ...]
    share: Share | None = None
    log_folder: str = ""


def child_main(name: str, task: Task, parent: int, pipe: Connection) -> NoReturn:
    """Run the task in a new process; `parent` is the parent's pid. Raises SystemExit."""
    # Ctrl-C in a terminal must reach only the parent, which stops its children in order.
    os.setpgid(0, 0)
    die_with(parent)
    show_as(name)
    report = reporter(pipe)
    try:
        if task.log_folder:
            keep_log(Path(task.log_folder, f"{name}{LOG_SUFFIX}"))
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


def take(share: Share) -> None:
    """Confine this process to its share of cores. Call this before torch is imported."""
    if share.cores:
        os.sched_setaffinity(0, share.cores)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(share.threads)
    # Waiting threads must not spin: they would take cores from the gateway and the router.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["KMP_BLOCKTIME"] = "0"


def reporter(pipe: Connection) -> Callable[[str, dict[str, Any]], None]:
    """Return a thread-safe report function; it does nothing once the parent has died."""
    lock = threading.Lock()

    def report(event: str, figures: dict[str, Any]) -> None:
        data = json.dumps([event, figures], default=str).encode()
        with lock:
            try:
                pipe.send_bytes(data)
            except OSError:
                log.debug("the parent has ended; dropped the report %s", event)

    return report
