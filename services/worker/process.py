"""The life of a worker process: listen, load the model, join the routers, report, drain, stop.

gRPC health checks return NOT_SERVING until the model is loaded, and while the engine is frozen
(common/stall_detector.py). The engine has work at least once a second, because its load is read
that often.
"""

import asyncio
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, ParamSpec, TypeVar

import grpc.aio

from pdserve.engine.api import EngineConfig
from pdserve.engine.build import build_engine
from pdserve.engine.checkpoints import CardData
from pdserve.engine.engine import Engine
from pdserve.engine.execution import DeviceLost
from pdserve.engine.thread import EngineThread
from pdserve.protos.common_pb2_grpc import add_BlobsServicer_to_server
from pdserve.protos.fleet_pb2 import Load, WorkerHello
from pdserve.services.common import lifecycle
from pdserve.services.common.auth.access import make_access
from pdserve.services.common.discovery import Discovery
from pdserve.services.common.lifecycle import Report, run_until_signal
from pdserve.services.common.logs import configure_logging
from pdserve.services.common.process import freeze_heap
from pdserve.services.common.rpc import BlobCache, BlobsServicer, advertised
from pdserve.services.common.server import GrpcServer
from pdserve.services.common.stall_detector import StallDetector
from pdserve.services.common.tracing import Tracer, tracing
from pdserve.services.worker.core import WorkerCore
from pdserve.services.worker.membership import Membership
from pdserve.services.worker.runtime import WorkerRuntime
from pdserve.services.worker.settings import DEREGISTER_S, ENGINE_CLOSE_S, WorkerSettings

if TYPE_CHECKING:
    from pdserve.services.common.metrics import MetricsPort
    from pdserve.services.worker.metrics import WorkerMetrics

log = logging.getLogger(__name__)

LOAD_S = 0.05  # between two loads, while their figures change
IDLE_LOAD_S = 1.0  # otherwise
LOOK_S = 0.5  # between two looks at the engine's counter
ALONE_S = 5.0  # without a router, after which the log says what the worker waits for
Params = ParamSpec("Params")
SettingsT = TypeVar("SettingsT", bound=WorkerSettings)
CoreT = TypeVar("CoreT", bound=WorkerCore[Any, Any])
RuntimeT = TypeVar("RuntimeT", bound=WorkerRuntime)


class WorkerRole(ABC, Generic[SettingsT, CoreT, RuntimeT]):
    """The parts of a worker process that differ between prefill and decode: its core, its gRPC
    servicer and its runtime. Construct it in the running loop."""

    service: ClassVar[str]  # full name of its gRPC service

    def __init__(self, settings: SettingsT, config: EngineConfig, core: CoreT) -> None:
        self.settings = settings
        self.core = core
        self.runtime: RuntimeT | None = None  # set when the model is loaded
        self._config = config
        self._loop = asyncio.get_running_loop()

    @abstractmethod
    def register(self, server: grpc.aio.Server) -> None:
        """Add the role's gRPC servicer to the server; it refuses work until `attach`."""

    @abstractmethod
    def make_runtime(self, engine: Engine, card: CardData, incarnation: bytes) -> RuntimeT:
        """Make the runtime: the engine thread and the hand-offs of KV. Called on the loading
        thread."""

    def build(self, incarnation: bytes, progress: Callable[[str, float], None]) -> RuntimeT:
        """Load the model and make the runtime, on the loading thread. `incarnation` is the random
        id of this process; `progress` receives the phase of loading and the fraction of it that is
        done."""
        config = replace(self._config, threads=self.settings.threads)
        engine, card = build_engine(config, progress)
        self.runtime = self.make_runtime(engine, card, incarnation)
        return self.runtime

    def attach(self) -> None:
        """Let the core accept work with the built runtime. Call on the event loop."""
        assert self.runtime is not None  # built
        self.core.attach(self.runtime)

    def on_loop(self, fn: Callable[Params, None]) -> Callable[Params, None]:
        """Wrap `fn` so that other threads can call it: it then runs on the event loop, in the order
        of the calls."""

        def post(*args: Params.args, **kwargs: Params.kwargs) -> None:
            self._loop.call_soon_threadsafe(partial(fn, *args, **kwargs))

        return post


AnyRole = WorkerRole[Any, Any, Any]


class LoadingPanicked(Exception):
    """Raised in place of a native library's panic during loading, since a panic is not an
    Exception."""


class LoadingStopped(Exception):
    """Raised inside the loading of the model to end it, because the process is stopping."""


class WorkerProcess:
    """A worker, from listening to its stop, without signal handling, so that tests can run it
    too."""

    def __init__(
        self,
        settings: WorkerSettings,
        role: AnyRole,
        report: Report,
        on_loaded: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_loaded` is called when the model is loaded, before the worker accepts work. Raises
        ValueError for settings that cannot work, OSError for files that cannot be read."""
        # Refuses an invalid target before the model is loaded.
        Discovery("--routers", settings.routers, lambda: None, ready_only=False)
        self.incarnation = os.urandom(16)
        self.address = ""
        self.runtime: WorkerRuntime | None = None
        self._access = make_access(settings)
        self.grpc_server = GrpcServer(self._access, services=(role.service, "pdserve.v1.Blobs"))
        loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[None] = loop.create_future()
        self.failed: asyncio.Future[None] = loop.create_future()  # done only after a failure
        self._settings = settings
        self._role = role
        self._report = report
        self._on_loaded = on_loaded
        self._blobs = BlobCache()
        self._membership: Membership | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._metrics: WorkerMetrics | None = None
        self._metrics_port: MetricsPort | None = None
        self._draining = self._stopped = False
        self._loading: threading.Thread | None = None
        self.hung = False  # cannot close: a thread hangs, or the device is lost

    async def start(self) -> None:
        """Listen, and start to load the model on a thread. Raises OSError if the address is
        taken."""
        add_BlobsServicer_to_server(BlobsServicer(self._blobs.get), self.grpc_server.server)
        self._role.register(self.grpc_server.server)
        port = self.grpc_server.listen(self._settings.bind)
        self.grpc_server.listen_for_probes(self._settings.bind, self._settings.probe_port)
        await self.grpc_server.start()
        bound = f"{self._settings.bind.rpartition(':')[0]}:{port}"
        self.address = advertised(bound, self._settings.advertise)
        self._report("listening", {"address": self.address})
        loop = asyncio.get_running_loop()
        self._loading = threading.Thread(target=self._build, args=(loop,), name="load", daemon=True)
        self._loading.start()

    async def drain(self) -> None:
        """Refuse new work, ask the routers to send none, and return when all work is done."""
        self._draining = True
        if self._membership is not None:
            self._membership.announce_drain()
            await asyncio.to_thread(self._membership.wait_announced)
        if self.runtime is not None:
            await self._role.core.drain()

    async def stop(self, grace_s: float) -> None:
        """Deregister from the routers, close the servers and end the engine; running calls have
        `grace_s` to finish."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        if self._membership is not None:
            await asyncio.to_thread(self._membership.close, DEREGISTER_S)
        await self.grpc_server.stop(grace_s)
        if self._metrics_port is not None:
            await self._metrics_port.close()
        if self._loading is not None:
            # Python aborts if a thread returns from a native call during interpreter exit.
            await asyncio.to_thread(self._loading.join, ENGINE_CLOSE_S)
            if self._loading.is_alive():
                self.hung = True
                log.critical("the loading thread did not end in time; the process exits without it")
        if self.runtime is not None:
            if self.runtime.thread.lost:
                self.hung = True  # every call that would free device memory fails
            else:
                await self._close(self.runtime)
        if not self.loaded.done():
            self.loaded.cancel()

    async def _close(self, runtime: WorkerRuntime) -> None:
        try:
            async with asyncio.timeout(ENGINE_CLOSE_S):
                await asyncio.to_thread(runtime.close)
        except TimeoutError:
            self.hung = True
            text = "the engine thread did not end in time; its stack:\n%s"
            log.critical(text, runtime.thread.stack())

    def _build(self, loop: asyncio.AbstractEventLoop) -> None:
        """Load the model, report the progress, and pass the runtime or the error to the event loop.
        Runs on the loading thread."""
        reported: tuple[str, int] | None = None

        def progress(phase: str, fraction: float) -> None:
            """Report the progress of loading, once per whole percent, since a model has hundreds of
            tensors. Raises LoadingStopped if the process is stopping."""
            nonlocal reported
            if self._stopped:
                raise LoadingStopped
            if (phase, int(100 * fraction)) != reported:
                reported = phase, int(100 * fraction)
                self._report("loading", {"what": phase, "fraction": fraction})

        try:
            runtime = self._role.build(self.incarnation, progress)
            loop.call_soon_threadsafe(self._ready, runtime)
        except LoadingStopped:
            pass
        except BaseException as error:  # a panic of a Rust library is not an Exception
            if not isinstance(error, Exception):
                error = LoadingPanicked(f"loading failed with {type(error).__name__}: {error}")
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._failed, error)

    def _failed(self, error: Exception) -> None:
        """Record that loading failed: set the error on `loaded`, from which `serve_worker` raises
        it, and end the process by `failed`."""
        if not self.loaded.done():
            self.loaded.set_exception(error)
        if not self.failed.done():
            self.failed.set_result(None)

    def _task_ended(self, task: "asyncio.Task[None]") -> None:
        """End the process if one of its background tasks has failed or was cancelled, because it
        would look alive but report nothing."""
        if self._stopped or self.failed.done():
            return
        if task.cancelled():
            self.failed.set_exception(RuntimeError(f"task {task.get_name()!r} was cancelled"))
        elif (error := task.exception()) is not None:
            self.failed.set_exception(error)

    def _ready(self, runtime: WorkerRuntime) -> None:
        if self._stopped:
            runtime.close()
            return
        self.runtime = runtime
        try:
            self._begin(runtime)
        except Exception as error:
            self._failed(error)
        else:
            self.loaded.set_result(None)

    def _begin(self, runtime: WorkerRuntime) -> None:
        """Accept work, register with the routers, and start the tasks that report loads and watch
        the engine. Raises OSError if the metrics port is taken."""
        for blob in runtime.blobs:
            self._blobs.add(blob)
        self._on_loaded()
        runtime.thread.start()
        hello = WorkerHello()
        hello.CopyFrom(runtime.hello)
        hello.incarnation, hello.address = self.incarnation, self.address
        hello.join_routers = self._settings.join_routers
        self._membership = Membership(
            hello,
            self._settings.routers,
            self._access,
            lambda: (runtime.thread.liveness, runtime.thread.busy),
        )
        if self._settings.metrics_port:
            # Imported here, because few processes have a metrics port and the imports take 50 ms.
            from pdserve.services.common.metrics import MetricsPort
            from pdserve.services.worker.metrics import WorkerMetrics

            self._metrics = WorkerMetrics(hello)
            bind = self._settings.bind
            self._metrics_port = MetricsPort(self._settings, bind, "", self._metrics)
        self._role.attach()
        self.grpc_server.set_serving(True)
        self._membership.start()
        self._tasks = [
            asyncio.create_task(self._report_loads(runtime, self._membership), name="loads"),
            asyncio.create_task(self._watch(runtime.thread), name="watch"),
            asyncio.create_task(self._report_ready(runtime), name="ready"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)
        self._report("loading", {"what": "model", "fraction": 1.0})

    async def _report_ready(self, runtime: WorkerRuntime) -> None:
        """Report the state `ready` once a router has opened a session. Before that, the router
        would send long prompts to another worker."""
        in_fleet = self._role.core.in_fleet
        try:
            async with asyncio.timeout(ALONE_S):
                await in_fleet.wait()
        except TimeoutError:
            routers = ", ".join(self._settings.routers) or "none configured"
            text = "not ready: the model is loaded, but no router (%s) has connected to %s yet"
            log.warning(text, routers, self.address)
            await in_fleet.wait()
        self._report("ready", dict(runtime.figures))

    async def _report_loads(self, runtime: WorkerRuntime, membership: Membership) -> None:
        last = Load()
        waited = IDLE_LOAD_S
        while True:
            if runtime.take_changed() or waited >= IDLE_LOAD_S:
                waited = 0.0
                future = runtime.thread.post(lambda _: runtime.snapshot())
                load, added, removed = await asyncio.wrap_future(future)
                membership.prefixes(added, removed)
                if self._metrics is not None:
                    self._metrics.load = load
                if load != last:
                    membership.report(load)
                    last = load
            await asyncio.sleep(LOAD_S)
            waited += LOAD_S

    async def _watch(self, thread: EngineThread) -> None:
        """Watch the engine thread's counter, and report NOT_SERVING in health checks while the
        engine is frozen. Does not call the engine, since a call into a frozen engine would hang.
        Raises DeviceLost once the device is lost."""
        loop = asyncio.get_running_loop()
        detector, serving = StallDetector(), True
        while True:
            await asyncio.sleep(LOOK_S)
            if thread.lost:
                raise DeviceLost(thread.lost)
            frozen = detector.look(thread.liveness, thread.busy, loop.time())
            if frozen == serving:
                serving = not frozen
                if frozen:
                    log.error(
                        "the engine is frozen: it makes no progress; the stack of its thread:\n%s",
                        thread.stack(),
                    )
                else:
                    log.error("the engine makes progress again")
                self.grpc_server.set_serving(serving and not self._draining)


def run_worker(
    settings: WorkerSettings, make_role: Callable[[Tracer], AnyRole], name: str, report: Report
) -> int:
    """Run a worker process until a signal; return its exit code. `make_role` is called in the event
    loop. Raises OSError if an address is taken, ValueError for settings that cannot work, and any
    error of loading the model."""

    async def serve(tracer: Tracer) -> int:
        return await serve_worker(settings, make_role(tracer), report, freeze_heap)

    configure_logging(name, settings.log_level, log_format=settings.log_format)
    with tracing(name, settings) as tracer:
        return lifecycle.run(serve(tracer))


async def serve_worker(
    settings: WorkerSettings,
    role: AnyRole,
    report: Report,
    on_loaded: Callable[[], None] = lambda: None,
) -> int:
    """Run a worker on the current event loop until a signal; return the exit code. The parameters
    are those of WorkerProcess. Raises any error of loading the model."""
    worker = WorkerProcess(settings, role, report, on_loaded)
    await worker.start()
    code = await run_until_signal(
        set_serving=worker.grpc_server.set_serving,
        drain=worker.drain,
        stop=worker.stop,
        drain_s=settings.drain_s,
        failed=(worker.failed,),
    )
    if worker.hung:  # Python would wait for its threads forever
        os._exit(1)
    if worker.loaded.done() and not worker.loaded.cancelled():
        worker.loaded.result()
    return code
