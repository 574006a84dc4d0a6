"""Runs several gateway processes behind the same ports, and the parent that supervises them.

The parent opens the listening socket, and each process accepts connections from it, so a connection
that arrives while one process restarts is served by another. gRPC cannot use a socket of another
process, so each process opens the gRPC port itself, and the parent keeps it reserved.
"""

import logging
import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pdserve.cli.up.child import Task
from pdserve.cli.up.folders import run_dir
from pdserve.cli.up.supervisor import Child, Supervisor, death_of
from pdserve.gateway.listener import ConnectionCounts, hold_port, listen, unix_listener
from pdserve.gateway.settings import GatewaySettings, GatewayWorker, worker_name
from pdserve.services.common.logs import configure_logging
from pdserve.services.common.options import GRACE_S, STOP_S
from pdserve.services.common.rate_limits import FILE_STORAGE, MEMORY_STORAGE
from pdserve.services.common.tracing import KEY_BYTES

log = logging.getLogger("pdserve.gateway")

ENTRY = "pdserve.gateway.main:run_worker"
STOP_SLACK_S = 2 * (GRACE_S + STOP_S)  # time that a process may take to stop after the drain


class GatewayWorkers:
    """A context manager that holds what several gateway processes share: the listening sockets, and
    the folder of their metrics and rate-limit counts. Raises OSError if an address is in use."""

    def __init__(
        self, settings: GatewaySettings, num: int, folder: Path, entry: str = ENTRY
    ) -> None:
        self._num = num
        self._folder = folder
        self._entry = entry
        self._trace_key = os.urandom(KEY_BYTES)
        self._metrics = folder / "metrics"
        self._metrics.mkdir()
        with ExitStack() as stack:
            self._listener = stack.enter_context(listen(settings.host, settings.port))
            grpc = stack.enter_context(hold_port(settings.host, settings.grpc_port))
            self._unix = stack.enter_context(unix_listener(settings.unix_socket))
            self._resources = stack.pop_all()
        rates = settings.rate_storage
        self._settings = replace(
            settings,
            port=self._listener.getsockname()[1],
            grpc_port=grpc.getsockname()[1],
            rate_storage=f"{FILE_STORAGE}{folder / 'rates.db'}"
            if rates == MEMORY_STORAGE
            else rates,
        )

    def __enter__(self) -> "GatewayWorkers":
        return self

    def __exit__(self, *exc: object) -> None:
        self._resources.close()

    def stop_listening(self) -> None:
        """Close the parent's listening sockets. Connections are refused once the gateway processes
        have closed theirs too."""
        self._listener.close()
        if self._unix is not None:
            self._unix.close()

    @property
    def names(self) -> list[str]:
        return [worker_name(index) for index in range(self._num)]

    def task(self, index: int) -> Task:
        """Make the task that gateway process number `index` runs, and remove the gauges and
        connection counts that the previous process with this number has left."""
        for path in self._metrics.glob(f"gauge_*_{index}.db"):
            path.unlink()
        worker = GatewayWorker(
            index, self._num, self._listener, self._unix, str(self._folder), self._trace_key
        )
        ConnectionCounts(worker.counts_file, index, self._num)  # unready until it has started
        return Task(self._entry, (self._settings, worker), log_folder=str(self._folder))


def run(settings: GatewaySettings) -> int:
    """Run `settings.workers` gateway processes until a signal; return the exit code. Raises OSError
    if an address is in use, StartError if no process can start."""
    configure_logging("gateway", settings.log_level, log_format=settings.log_format)
    parent = _Parent()
    num = settings.workers
    with (
        run_dir() as folder,
        GatewayWorkers(settings, num, folder) as workers,
        Supervisor(
            parent.on_event, serving=lambda: parent.listening, reloading=workers.names
        ) as supervisor,
    ):
        children: list[Child] = []
        try:
            for index, name in enumerate(workers.names):
                children.append(supervisor.start(name, partial(workers.task, index)))
            supervisor.run_until(lambda: False)
        finally:
            parent.stopping = True
            workers.stop_listening()
            clean = supervisor.stop([children], settings.drain_s + STOP_SLACK_S)
    return 0 if clean else 1


class _Parent:
    """Logs the events of the gateway processes in their parent."""

    def __init__(self) -> None:
        self.listening = False  # one process has started, so all can
        self.stopping = False

    def on_event(self, child: Child, event: str, figures: dict[str, Any]) -> None:
        if event == "listening":
            self.listening = True
            log.info("%s listens at %s, gRPC at %s", child.name, figures["url"], figures["grpc"])
        elif event == "ready":
            log.info("%s is ready", child.name)
        elif event == "died" and not self.stopping:
            log.warning("%s %s", child.name, death_of(child, figures["code"]))
            if figures["restart_s"]:
                log.warning("%s starts again in %g s", child.name, figures["restart_s"])
