"""Replacements for the services' clock, threads and network in a simulation.

All other code is the production code. `entered` replaces the names below for one run at a time.
Each replacement is the same class without its thread, or an adapter to the network.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from pdserve.engine.handoff.protocol import PROGRESS_S
from pdserve.engine.handoff.receiver import Receiver
from pdserve.engine.handoff.sender import Sender
from pdserve.engine.thread import IDLE_TURN_S, EngineThread
from pdserve.services.common.auth.certificates import Role
from pdserve.services.common.tracing import Tracer
from pdserve.services.router.main import RouterProcess
from simulation.clock import Process, World, here
from simulation.data_plane import DialThread, SimLink, SimTransport
from simulation.joining import LoopLease, LoopMembership
from simulation.network import Network
from simulation.notes import Notes
from simulation.rpc import Channel, Server

STEP_S = 0.002  # time per step, and per token of a step
TOKEN_S = 0.0015
log = logging.getLogger("pdserve.simulation")
PORT = 5000  # port of every gRPC server
SLOT_BYTES = 128  # small frames, so that a prompt has several


class LoopEngineThread(EngineThread):
    """An engine thread whose turns are callbacks; a step takes time between its plan and its
    results."""

    watch: Callable[[Process, Any], None] = staticmethod(lambda process, plan: None)

    def __init__(self, engine: Any, on_step: Any) -> None:
        super().__init__(engine, on_step)
        self._process: Process = here()
        self._started = self._computing = self._soon = False
        self._hangs = 0  # hangs that have not ended; two may overlap
        self._due: list[Callable[[], None]] = []  # actions that came due during a hang
        self._idle_turn: Any = None

    @property
    def busy(self) -> bool:
        return self._computing or bool(self._posted) or self._engine.has_work

    def hang(self) -> None:
        """Stop the engine until each hang has ended with a `thaw`."""
        self._hangs += 1

    def thaw(self) -> None:
        """End one hang. Actions that came due run in the engine's process if it still runs."""
        self._hangs -= 1
        if not self._hangs:
            due, self._due = self._due, []
            for act in due:
                self._process.call_soon(act)

    def start(self) -> None:
        self._started = True
        self._turn_soon()

    def close(self) -> None:
        self._closing = True
        self._cancel_posted()

    def post(self, fn: Any) -> Any:
        future = super().post(fn)
        self._turn_soon()
        return future

    def wake(self) -> None:
        self._turn_soon()

    def _turn_soon(self) -> None:
        if self._started and not self._computing and not self._soon and not self._closing:
            self._soon = True
            self._process.call_soon(self._turn)

    def _turn(self) -> None:
        if self._hangs:
            self._due.append(self._turn)
            return
        self._soon = False
        if self._idle_turn is not None:
            self._idle_turn.cancel()
            self._idle_turn = None
        if self._computing or self._closing:
            return
        if wrong := self._engine.discrepancy(recount=True):
            log.error("blocks do not add up: %s", wrong)
        self._liveness.beat(self._process.time())
        self._run_posted()
        more = self._poll()
        try:
            plan = self._plan()
        except Exception as error:
            self._fail_requests(error)
            more, plan = True, None
        if plan is not None:
            self._computing = True
            self._process.call_later(STEP_S + TOKEN_S * plan.num_tokens, self._computed, plan)
            self.watch(self._process, plan)
        elif more or self._posted:
            self._turn_soon()
        elif self._engine.has_work:
            self._idle_turn = self._process.call_later(IDLE_TURN_S, self._turn)

    def _computed(self, plan: Any) -> None:
        if self._hangs:
            self._due.append(partial(self._computed, plan))
            return
        self._computing = False
        if self._closing:
            return
        try:
            self._record_step(plan)
            self._send_events(self._engine.collect(self._engine.launch(plan)))
        except Exception as error:
            self._fail_requests(error)
        self._turn_soon()


class _Beats:
    """The ticker thread of an Endpoint as a timer."""

    _process: Process
    _stop: threading.Event
    _beat: Callable[[], None]

    def start(self) -> None:
        self._process.call_later(PROGRESS_S, self._tick)

    def _tick(self) -> None:
        if not self._stop.is_set():
            self._beat()
            self._process.call_later(PROGRESS_S, self._tick)


class LoopReceiver(_Beats, Receiver):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._process = here()
        super().__init__(*args, **kwargs, clock=self._process.time)


class LoopSender(_Beats, Sender):
    network: Network

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._process = here()
        super().__init__(*args, **kwargs, clock=self._process.time)
        self._dial_threads.shutdown()
        self._dial_threads = DialThread(self._process, self.network)  # type: ignore[assignment]


class LoopHost:
    """GrpcServer on the simulated network; binds to NAME:0."""

    network: Network

    def __init__(self, *_: Any, **__: Any) -> None:
        self.server = Server(here(), self.network)
        self.serving = False

    def listen(self, bind: str) -> int:
        return PORT

    def listen_for_probes(self, bind: str, port: int) -> None:
        """Do nothing: no probes are sent."""

    async def start(self) -> None:
        self.network.listen(f"{here().name}:{PORT}", here(), self.server)

    def set_serving(self, serving: bool) -> None:
        self.serving = serving

    async def stop(self, grace_s: float) -> None:
        await self.server.stop(grace_s)


class LoopAccess:
    """Unauthenticated access: processes of the simulation trust each other. Other tests cover
    authentication."""

    metadata = ()

    def __init__(self, network: Network) -> None:
        self._network = network

    def open_channel(self, address: str, to: Role) -> Channel:
        return Channel(self._network, address)

    def may_be(self, context: Any, role: Role) -> bool:
        return True


class LoadingThread:
    """Replaces threading.Thread in a worker that loads its model."""

    def __init__(self, target: Any, args: Any = (), **_: Any) -> None:
        self._run = partial(target, *args)
        self._ended = False

    def start(self) -> None:
        here().call_soon(self._load)

    def _load(self) -> None:
        self._run()
        self._ended = True

    def is_alive(self) -> bool:
        return not self._ended

    def join(self, timeout: float) -> None:
        """Do nothing: the loader runs on the loop before any caller that waits here."""


class SeenRouter(RouterProcess):
    """A router process that registers as the service of its simulated process."""

    def __init__(self, settings: Any, tracer: Tracer) -> None:
        super().__init__(settings, tracer)
        here().service = self


class Errors(logging.Handler):
    """Collects errors that the services log; each is a violation."""

    def __init__(self, into: list[str], expected: tuple[str, ...]) -> None:
        super().__init__(logging.ERROR)
        self._into, self._expected = into, expected

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {record.exc_info[1]!r}"
        if not any(word in text for word in self._expected):
            self._into.append(f"{record.name}: {text}")


NOT_FINDINGS = ("engine is frozen", "engine makes progress again")


@contextmanager
def entered(world: World, network: Network, seed: object) -> Iterator[None]:
    """Run the services in this world while the context is open; log messages above the level of a
    warning go to `world.errors`."""
    entropy = Random(f"entropy {seed}")
    logger = logging.getLogger("pdserve")
    errors = Errors(world.errors, NOT_FINDINGS)
    before = logger.level, logger.propagate

    def build(config: Any, progress: Any) -> Any:
        return here().build()

    def open_ring(folder: str, role: str, incarnation: bytes, megabytes: int) -> Notes:
        world.notes.append(Notes(world, role, incarnation))
        return world.notes[-1]

    def transports(choice: str, options: Any) -> list[SimTransport]:
        return [SimTransport(network, options.slot_bytes)]

    # Bound class methods find the network on the class, so one simulation runs at a time.
    LoopSender.network = LoopLease.network = LoopHost.network = network
    replaced: dict[str, Any] = {
        "pdserve.engine.handoff.protocol.frames.SLOT_BYTES": SLOT_BYTES,
        "pdserve.engine.handoff.connection.connect.DataLink": SimLink,
        "pdserve.services.worker.runtime.EngineThread": LoopEngineThread,
        "pdserve.services.decode.runtime.Receiver": LoopReceiver,
        "pdserve.services.worker.runtime.Sender": LoopSender,
        "pdserve.services.worker.runtime.make_transports": transports,
        "pdserve.services.worker.runtime.open_ring": open_ring,
        "pdserve.services.router.main.open_ring": open_ring,
        "pdserve.services.worker.runtime.shm_folder": lambda configured: "",
        "pdserve.services.worker.membership._Lease": LoopLease,
        "pdserve.services.worker.process.Membership": LoopMembership,
        # On a second signal, end the simulated process instead of this one.
        "pdserve.services.common.lifecycle.os": SimpleNamespace(_exit=lambda code: here().kill()),
        "pdserve.services.worker.process.GrpcServer": LoopHost,
        "pdserve.services.worker.process.threading": SimpleNamespace(Thread=LoadingThread),
        "pdserve.services.worker.process.build_engine": build,
        "pdserve.services.router.main.RouterProcess": SeenRouter,
        "pdserve.services.router.core.random": SimpleNamespace(
            Random=lambda: Random(entropy.random())
        ),
        "pdserve.services.router.main.GrpcServer": LoopHost,
        "pdserve.services.router.main.make_access": lambda settings: LoopAccess(network),
        "pdserve.services.worker.process.make_access": lambda settings: LoopAccess(network),
        "pdserve.services.common.discovery.resolve": lambda name: [name],
    }
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(patch(name, value))
        stack.enter_context(patch.object(time, "monotonic", lambda: world.now))
        stack.enter_context(patch.object(time, "monotonic_ns", lambda: int(world.now * 1e9)))
        stack.enter_context(patch.object(os, "urandom", entropy.randbytes))
        logger.addHandler(errors)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(errors)
            logger.setLevel(before[0])
            logger.propagate = before[1]
