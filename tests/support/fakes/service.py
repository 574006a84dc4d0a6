"""Services for tests of their supervisor: each has one behaviour, none does any work."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdserve.engine.api import EngineConfig
from pdserve.services.common.lifecycle import Report

IMPORTED_BY = os.getpid()  # in a forked child this is the fork server


class Unreadable:
    """An argument that cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def until_sigterm() -> int:
    signal.sigwait({signal.SIGTERM})
    return 0


def until_sigterm_with_reloads(report: Report) -> int:
    """Wait for SIGTERM; report each SIGHUP."""
    while signal.sigwait({signal.SIGTERM, signal.SIGHUP}) == signal.SIGHUP:
        report("reloaded", {"reloads": True})
    return 0


def block(*more: signal.Signals) -> None:
    """Block SIGTERM and other signals until until_sigterm."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, *more})


def good(*args: Any, report: Report) -> int:
    """Load, become ready, and end in order."""
    block()
    report("listening", {"address": "127.0.0.1:1", "args": [repr(a) for a in args]})
    report("loading", {"fraction": 0.5})
    facts = {
        "pid": os.getpid(),
        "pgid": os.getpgid(0),
        "cores": sorted(os.sched_getaffinity(0)),
        "omp": os.environ.get("OMP_NUM_THREADS", ""),
        "wait": os.environ.get("OMP_WAIT_POLICY", ""),
        "torch": "torch" in sys.modules,
        "imported_by": IMPORTED_BY,
        "ppid": os.getppid(),
        "num_fds": len(os.listdir("/proc/self/fd")),
        "blocked": sorted(set(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))),
    }
    report("ready", facts)
    return until_sigterm()


def logged(path: str, name: str, report: Report) -> int:
    """Behave like `good`; write its name to the file at its end."""
    code = good(report=report)
    with Path(path).open("a") as file:
        file.write(name + "\n")
    return code


def model_check(configs: Sequence[EngineConfig], *logs: str, report: Report) -> int:
    """Accept every model. One with "encoder" in its name uses no prefill worker."""
    models = [
        {
            "name": config.served_name or Path(config.model).name,
            "uses_prefill": "encoder" not in config.model,
        }
        for config in configs
    ]
    report("checked", {"models": models})
    return 0


def killed(report: Report) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def ending(report: Report) -> int:
    """End the whole system once it is ready; a second report has no further effect."""
    block()
    report("ready", {"pid": os.getpid()})
    report("shutdown", {})
    report("shutdown", {})
    return until_sigterm()


def reloading(report: Report) -> int:
    """Reload something at SIGHUP."""
    block(signal.SIGHUP)
    report("ready", {"pid": os.getpid()})
    return until_sigterm_with_reloads(report)


def slow(report: Report) -> int:
    """Load forever."""
    report("loading", {"pid": os.getpid(), "fraction": 0.5})
    return until_sigterm()


def broken(report: Report) -> int:
    """Never become ready."""
    raise OSError("no such model: nowhere.gguf")


def surprised(report: Report) -> int:
    """Fail with an unexpected error."""
    raise KeyError("oops")


def mortal(report: Report) -> int:
    """Die as soon as it is ready."""
    report("ready", {"pid": os.getpid()})
    return 3


def stubborn(report: Report) -> int:
    """Ignore the request to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    report("ready", {"pid": os.getpid()})
    while True:
        time.sleep(60)


def trust(settings: Any) -> dict[str, Any]:
    """Return the credentials that the process presents to others."""
    return {
        "secret": settings.cluster_secret,
        "ca": settings.cluster_ca,
        "cert": settings.cluster_cert,
    }


def router(settings: Any, report: Report) -> int:
    """Run a router as `pdserve up` starts it."""
    block(signal.SIGHUP)
    facts = {"bind": settings.bind, "address": settings.bind, **trust(settings)}
    keys = {"api_keys": settings.api_keys, "api_key_file": settings.api_key_file}
    limits = {**keys, "queue_timeout_s": settings.queue_timeout_s}
    report("listening", facts | limits | {"trace_dir": settings.trace_dir})
    report("ready", {"pid": os.getpid()})
    return until_sigterm_with_reloads(report)


def gateway(settings: Any, report: Report) -> int:
    block(signal.SIGHUP)
    report("listening", {"url": f"http://{settings.host}:{settings.port}", "grpc": "g:1"})
    facts = {"routers": settings.routers, **trust(settings)}
    facts["database_url"] = settings.database_url
    report("ready", {"pid": os.getpid(), "models": ["fake"], **facts})
    return until_sigterm_with_reloads(report)


def gateway_worker(settings: Any, worker: Any, report: Report) -> int:
    """Report what it shares with the others."""
    report("sockets", {"shared": [s.getsockname() for s in (worker.listener, worker.unix) if s]})
    report("sockets", {"index": worker.index, "rates": settings.rate_storage})
    return gateway(settings, report)


def worker(settings: Any, engine: Any, report: Report) -> int:
    block()
    report("listening", {"address": "127.0.0.1:2", "data_address": "127.0.0.1:3"})
    report("loading", {"fraction": 0.3})
    report("loading", {"fraction": 1.0})
    facts = {
        "pid": os.getpid(),
        "role": type(settings).__name__.removesuffix("Settings").lower(),
        "routers": settings.routers,
        **trust(settings),
        "threads": settings.threads,
        "shm_dir": settings.shm_dir,
        "trace_dir": settings.trace_dir,
        "model": engine.model,
        "host_engines": engine.host_engines,
        "kv_tokens": 1000,
    }
    Path(settings.shm_dir, f"{os.getpid()}.sock").touch()
    report("ready", facts)
    return until_sigterm()


def broken_worker(settings: Any, engine: Any, report: Report) -> int:
    return broken(report)


def stubborn_worker(settings: Any, engine: Any, report: Report) -> int:
    return stubborn(report)
