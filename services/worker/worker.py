"""What a prefill and a decode process share: listen, load, join the routers, report, drain, stop.

gRPC health answers NOT_SERVING from the first moment; SERVING once the model is loaded, and not
while the engine is frozen (host/stall_detector.py): it has work at least once a second, because
the load is asked for that often. The engine's types are known here by shape only.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, ParamSpec, Protocol

import grpc.aio
from prometheus_client import CollectorRegistry

from pdserve.protos.common_pb2_grpc import add_BlobsServicer_to_server
from pdserve.protos.fleet_pb2 import Load, WorkerHello
from pdserve.services.host.addresses import advertised
from pdserve.services.host.lifecycle import Report, run_until_signal
from pdserve.services.host.server import GrpcHost, MetricsHttp
from pdserve.services.host.stall_detector import StallDetector
from pdserve.services.worker.blobs import WorkerBlobs
from pdserve.services.worker.membership import Membership
from pdserve.services.worker.metrics import WorkerMetrics
from pdserve.services.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

LOAD_S = 0.05  # between two loads, while something changes
IDLE_LOAD_S = 1.0  # otherwise
CLOSE_S = 10.0  # for the engine's thread to end, and the hand-offs
LOOK_S = 0.5  # between two looks at the engine's counter
Progress = Callable[[str, float], None]
Params = ParamSpec("Params")
Snapshot = tuple[Load, list[bytes], list[bytes]]


def on_loop(loop: asyncio.AbstractEventLoop, fn: Callable[Params, None]) -> Callable[Params, None]:
    """`fn`, to be called from other threads: it runs on the loop, in the order of the calls."""

    def post(*args: Params.args, **kwargs: Params.kwargs) -> None:
        loop.call_soon_threadsafe(partial(fn, *args, **kwargs))

    return post


class Turning(Protocol):
    """engine/thread.py EngineThread."""

    @property
    def steps(self) -> int: ...
    @property
    def busy(self) -> bool: ...
    def stack(self) -> str: ...
    def start(self) -> None: ...
    def close(self) -> None: ...
    def post(self, fn: Callable[[Any], object]) -> "Future[Any]": ...


class WorkerRuntime(Protocol):
    """A role's engine and hand-off, made when the model is loaded."""

    @property
    def thread(self) -> Turning: ...
    @property
    def hello(self) -> WorkerHello:
        """Without boot and address."""

    @property
    def blobs(self) -> list[bytes]: ...
    @property
    def figures(self) -> Mapping[str, Any]:
        """Of the report "ready"."""

    @property
    def changed(self) -> bool:
        """Whether the load may have changed since last asked; any thread."""

    def snapshot(self) -> Snapshot:
        """Load, and prefix hashes added and removed; on the engine thread."""

    def close(self) -> None:
        """End every hand-off and the engine thread."""


class Role(Protocol):
    """prefill or decode."""

    @property
    def services(self) -> tuple[str, ...]: ...
    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicers; they refuse work until `attach`."""

    def build(self, boot: bytes, progress: Progress) -> WorkerRuntime:
        """Load; on a thread of its own. `boot` names this life of the process."""

    def attach(self) -> None:
        """Begin to take work with what was built; on the loop."""

    async def drain(self) -> None:
        """Refuse new work; returns when nothing is left."""


class WorkerProcess:
    """A running worker; tests use it without signals."""

    def __init__(self, settings: WorkerSettings, role: Role, report: Report) -> None:
        self.boot = os.urandom(16)
        self.address = ""
        self.part: WorkerRuntime | None = None
        self.host = GrpcHost(
            settings.bind, settings.cluster_secret, services=(*role.services, "pdserve.v1.Blobs")
        )
        self.loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._settings = settings
        self._role = role
        self._report = report
        self._blobs = WorkerBlobs()
        self._membership: Membership | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._metrics: WorkerMetrics | None = None
        self._metrics_http: MetricsHttp | None = None
        self._draining = self._stopped = False
        self.hung = False  # its engine's thread did not end at the stop

    async def start(self) -> None:
        """Listen, and begin to load. Raises OSError if the address is taken."""
        add_BlobsServicer_to_server(self._blobs, self.host.server)
        self._role.register(self.host.server)
        port = await self.host.start()
        bound = f"{self._settings.bind.rpartition(':')[0]}:{port}"
        self.address = advertised(bound, self._settings.advertise)
        self._report("listening", {"address": self.address})
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._build, args=(loop,), name="load", daemon=True).start()

    async def drain(self) -> None:
        self._draining = True
        if self._membership is not None:
            self._membership.goodbye()
        if self.part is not None:
            await self._role.drain()

    async def stop(self, grace_s: float) -> None:
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        if self._membership is not None:
            await asyncio.to_thread(self._membership.close)
        await self.host.stop(grace_s)
        if self._metrics_http is not None:
            await asyncio.to_thread(self._metrics_http.close)
        if self.part is not None:
            await self._close(self.part)
        if not self.loaded.done():
            self.loaded.cancel()

    async def _close(self, part: WorkerRuntime) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.to_thread(part.close)
        except TimeoutError:
            self.hung = True
            log.critical("the engine's thread does not end; it is at\n%s", part.thread.stack())

    def _build(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loading thread."""

        def progress(what: str, fraction: float) -> None:
            self._report("loading", {"what": what, "fraction": fraction})

        try:
            part = self._role.build(self.boot, progress)
            loop.call_soon_threadsafe(self._ready, part)
        except Exception as error:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._failed, error)

    def _failed(self, error: Exception) -> None:
        if not self.loaded.done():
            self.loaded.set_exception(error)

    def _ready(self, part: WorkerRuntime) -> None:
        if self._stopped:
            part.close()
            return
        self.part = part
        try:
            self._begin(part)
        except Exception as error:
            self._failed(error)
        else:
            self.loaded.set_result(None)

    def _begin(self, part: WorkerRuntime) -> None:
        """Take work, join the routers, say so. Raises OSError if the metrics port is taken."""
        self._blobs.publish(part.blobs)
        part.thread.start()
        hello = WorkerHello()
        hello.CopyFrom(part.hello)
        hello.boot, hello.address = self.boot, self.address
        self._membership = Membership(
            hello,
            self._settings.routers,
            self._settings.cluster_secret,
            lambda: (part.thread.steps, part.thread.busy),
        )
        if self._settings.metrics_port:
            self._metrics = WorkerMetrics(self.address, hello.card.name)
            registry = CollectorRegistry()
            registry.register(self._metrics)
            host = self._settings.bind.rpartition(":")[0].strip("[]")
            self._metrics_http = MetricsHttp(registry, self._settings.metrics_port, host)
        self._role.attach()
        self.host.set_serving(True)
        self._membership.start()
        self._tasks = [
            asyncio.create_task(self._report_loads(part, self._membership)),
            asyncio.create_task(self._watch(part.thread)),
        ]
        self._report("ready", dict(part.figures))

    async def _report_loads(self, part: WorkerRuntime, membership: Membership) -> None:
        last = Load()
        waited = IDLE_LOAD_S
        while True:
            if part.changed or waited >= IDLE_LOAD_S:
                waited = 0.0
                future = part.thread.post(lambda _: part.snapshot())
                load, added, removed = await asyncio.wrap_future(future)
                membership.prefixes(added, removed)
                if self._metrics is not None:
                    self._metrics.load = load
                if load != last:
                    membership.report(load)
                    last = load
            await asyncio.sleep(LOAD_S)
            waited += LOAD_S

    async def _watch(self, thread: Turning) -> None:
        """Found frozen by its turns, not by a call that would wait for it."""
        loop = asyncio.get_running_loop()
        seen, serving = StallDetector(), True
        while True:
            await asyncio.sleep(LOOK_S)
            frozen = seen.look(thread.steps, thread.busy, loop.time())
            if frozen == serving:
                serving = not frozen
                if frozen:
                    log.error("engine frozen; its thread is at\n%s", thread.stack())
                else:
                    log.error("engine moves again")
                self.host.set_serving(serving and not self._draining)


async def serve_worker(settings: WorkerSettings, role: Role, report: Report) -> int:
    """Serve until a signal; returns the exit code. Raises what loading raised."""
    worker = WorkerProcess(settings, role, report)
    await worker.start()
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def loaded(future: "asyncio.Future[None]") -> None:
        if not future.cancelled() and future.exception() is not None and not failed.done():
            failed.set_result(None)

    worker.loaded.add_done_callback(loaded)
    code = await run_until_signal(
        set_serving=worker.host.set_serving,
        drain=worker.drain,
        stop=worker.stop,
        drain_s=settings.drain_s,
        failed=failed,
    )
    if worker.hung:  # Python would wait for its thread for ever
        os._exit(1)
    if worker.loaded.done() and not worker.loaded.cancelled():
        worker.loaded.result()
    return code
