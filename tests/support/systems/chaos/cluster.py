"""A system of real processes, each started as `pdserve up` does, that a test kills one by one.

Spare workers are started ahead, so that a kill need not wait for the next start.
"""

import json
import multiprocessing
import os
import random
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import grpc
import psutil

from pdserve.cli.up.child import MAX_REPORT_BYTES, Task, child_main
from pdserve.cli.up.command import ENTRIES
from pdserve.cli.up.cores import Share
from pdserve.engine.api import EngineConfig
from pdserve.gateway.settings import GatewaySettings
from pdserve.protos import fleet_pb2, router_pb2, router_pb2_grpc
from pdserve.services.router.settings import RouterSettings
from pdserve.services.worker.settings import DecodeSettings, PrefillSettings
from systems.cluster_secret import BEARER, SECRET
from systems.eventually import wait_until
from systems.fault_proxy import FaultProxy

START_S = 180.0  # for a busy machine
LINKS = ("gateway-router", "router-decode", "router-prefill", "prefill-decode")
ROLES = {"prefill": fleet_pb2.PREFILL, "decode": fleet_pb2.DECODE}


def child(name: str, task: Task, parent: int, pipe: Connection, log: str) -> None:
    """Run the target of a spawned process; its reports go to a separate file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(file, number)
    child_main(name, task, parent, pipe)


@dataclass(eq=False)
class Process:
    """One process from its start to its end."""

    role: str
    child: SpawnProcess
    pipe: Connection
    log: Path
    started: float
    ready_s: float = 0.0  # 0: not ready
    figures: dict[str, Any] = field(default_factory=dict)
    incarnation: bytes = b""  # of a worker that the router knows

    @property
    def pid(self) -> int:
        assert self.child.pid is not None  # started
        return self.child.pid

    @property
    def address(self) -> str:
        """Return the address for other processes."""
        return str(self.figures["address"])

    def hear(self) -> None:
        """Read its reports."""
        with suppress(EOFError, OSError):
            while self.pipe.poll():
                event, figures = json.loads(self.pipe.recv_bytes(MAX_REPORT_BYTES))
                self.figures.update(figures)
                if event == "ready":
                    self.ready_s = time.monotonic() - self.started


@dataclass(frozen=True)
class Shape:
    """The number of live workers, and their configuration."""

    model: Path
    prefills: int = 1
    decodes: int = 1
    routers: int = 1
    proxied: bool = False  # every hop except the join streams goes through a FaultProxy
    kv_tokens: int = 32_768
    chunk_size: int = 64
    threshold: int = 128  # shorter prompts are prefilled at decode


class Cluster:
    """Context manager: `with Cluster(folder, shape) as cluster`; at the end all its processes are
    gone.
    """

    def __init__(self, folder: Path, shape: Shape, rings: Path | None = None) -> None:
        self.shape = shape
        self.rings = rings or folder / "rings"
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True)
        self.processes: list[Process] = []  # alive, as far as is known
        self.strikes: list[Any] = []  # that a run keeps for its end
        self.num_started = 0
        self.start_s: list[float] = []  # of the workers
        self.proxies: dict[str, FaultProxy] = {}
        self._context = multiprocessing.get_context("spawn")

    def __enter__(self) -> "Cluster":
        try:
            if self.shape.proxied:
                self.proxies = {link: FaultProxy() for link in LINKS}
            self.start_router()
            self.refill()
            self.start_gateway()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End all processes, the gateway first."""
        for role in ("gateway", "router", "decode", "prefill"):
            ending = [p for p in self.processes if p.role == role]
            for process in ending:
                process.child.terminate()
            for process in ending:
                process.child.join(15)
                if process.child.is_alive():
                    process.child.kill()
                self._bury(process)
        for proxy in self.proxies.values():
            proxy.close()

    # --- processes

    def _start(self, role: str, args: tuple[Any, ...], share: Share | None = None) -> Process:
        mine, theirs = self._context.Pipe(duplex=False)
        log = self.logs / f"{self.num_started:03d}-{role}.log"
        self.num_started += 1
        spawned = self._context.Process(
            target=child,
            args=(role, Task(ENTRIES[role], args, share), os.getpid(), theirs, str(log)),
            name=role,
        )
        spawned.start()
        theirs.close()
        process = Process(role, spawned, mine, log, time.monotonic())
        self.processes.append(process)
        return process

    def start_router(self, address: str = "") -> Process:
        """Start a router; returns once it listens. Workers and gateways know that address from now
        on.
        """
        address = address or f"127.0.0.1:{lasting_port()}"
        made = RouterSettings(
            bind=address,
            cluster_secret=(SECRET,),
            remote_prefill_threshold=self.shape.threshold,
            trace_dir=str(self.rings),
            drain_s=0.2,
            log_level="debug",  # the end of each request
        )
        router = self._start("router", (made,))
        self._listening(router)
        self.router = router.address
        if self.proxies:
            self.proxies["gateway-router"].target = router.address
        return router

    def start_gateway(self) -> Process:
        proxy = self.proxies.get("gateway-router")
        made = GatewaySettings(
            port=0,
            routers=(proxy.address if proxy else self.router,),
            cluster_secret=(SECRET,),
            drain_s=0.2,
        )
        gateway = self._start("gateway", (made,))
        self._listening(gateway, "url")
        self.url = str(gateway.figures["url"])
        return gateway

    def start_worker(self, role: str) -> Process:
        """Start a worker. With proxies there is one worker of a role: it is reached through its
        proxy.
        """
        mine = self.proxies.get(f"router-{role}")
        common = {
            "routers": (self.router,),
            "cluster_secret": (SECRET,),
            "threads": 1,
            "kv_transport": "tcp",
            "trace_dir": str(self.rings),
            "advertise": mine.address if mine else "",
            "drain_s": 0.2,
        }
        settings: PrefillSettings | DecodeSettings = PrefillSettings(**common)
        if role == "decode":
            data = self.proxies.get("prefill-decode")
            settings = DecodeSettings(**common, data_advertise=data.address if data else "")
        engine = EngineConfig(
            model=str(self.shape.model),
            kv_tokens=self.shape.kv_tokens,
            chunk_size=self.shape.chunk_size,
        )
        worker = self._start(role, (settings, engine), Share(1))
        if mine is not None:
            self._listening(worker)
            before = _listened(worker.pid)
            mine.target = f"127.0.0.1:{before.pop()}"
            if role == "decode":
                wait_until(
                    lambda: len(_listened(worker.pid)) == 2, "decode's listeners", limit_s=START_S
                )
                (port,) = _listened(worker.pid) - {int(mine.target.rpartition(":")[2])}
                self.proxies["prefill-decode"].target = f"127.0.0.1:{port}"
        return worker

    def _listening(self, process: Process, figure: str = "address") -> None:
        def listens() -> bool:
            process.hear()
            assert process.child.is_alive(), process.log.read_text()
            return figure in process.figures

        wait_until(listens, f"{process.role} to listen", limit_s=START_S)

    def refill(self) -> None:
        """Start missing workers without waiting for them."""
        for role, wanted in (("decode", self.shape.decodes), ("prefill", self.shape.prefills)):
            for _ in range(wanted - len(self.of(role))):
                self.start_worker(role)

    def of(self, role: str) -> list[Process]:
        return [p for p in self.processes if p.role == role]

    def hear(self) -> None:
        """Read reports; look up the incarnations of the workers that have joined."""
        for process in self.processes:
            process.hear()
        if any(p.role in ROLES and p.ready_s and not p.incarnation for p in self.processes):
            incarnations = {w.hello.address: w.hello.incarnation for w in self.view().workers}
            for process in self.processes:
                if process.role in ROLES and process.ready_s and not process.incarnation:
                    process.incarnation = incarnations.get(process.address, b"")
                    if process.incarnation:
                        self.start_s.append(process.ready_s)

    def joined(self, role: str) -> list[Process]:
        """Return live workers of a role that the router knows."""
        self.hear()
        return [p for p in self.of(role) if p.incarnation]

    def wait_ready(self) -> None:
        """Wait until every started process has joined, and the gateway serves."""

        def ready() -> bool:
            for process in self.processes:
                assert process.child.is_alive(), process.log.read_text()[-4000:]
            self.hear()
            workers = all(p.incarnation for p in self.processes if p.role in ROLES)
            return workers and all(p.ready_s for p in self.of("gateway"))

        wait_until(ready, "a whole system", limit_s=START_S)

    def kill(self, process: Process) -> int:
        """Send SIGKILL; return the monotonic time in ns just before it."""
        now = time.monotonic_ns()
        os.kill(process.pid, signal.SIGKILL)
        process.child.join()
        self._bury(process)
        return now

    def _bury(self, process: Process) -> None:
        process.child.join()
        process.child.close()
        process.pipe.close()
        self.processes.remove(process)

    # --- the router's view

    def view(self) -> router_pb2.FleetView:
        """Return the fleet view. Raises grpc.RpcError while no router answers."""
        with grpc.insecure_channel(self.router) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            return stub.GetFleet(
                router_pb2.GetFleetRequest(),
                metadata=BEARER,
                wait_for_ready=True,
                timeout=5,
            )

    def loads(self) -> dict[bytes, fleet_pb2.Load]:
        """Return loads of the live workers by incarnation."""
        alive = {p.incarnation for p in self.processes if p.incarnation}
        return {
            w.hello.incarnation: w.load for w in self.view().workers if w.hello.incarnation in alive
        }

    def blocks_back(self) -> bool:
        """Return whether no block is used, reserved, promised or parked on any live worker."""
        loads = self.loads()
        alive = [p for p in self.processes if p.incarnation]
        return len(loads) == len(alive) and all(
            load.blocks_total and load.blocks_free + load.blocks_cached == load.blocks_total
            and not load.promised_tokens and not load.parked and not load.waiting
            for load in loads.values()
        )  # fmt: skip

    def prompt_tokens(self) -> dict[bytes, int]:
        """Return the tokens computed so far, by worker."""
        return {incarnation: load.prompt_tokens for incarnation, load in self.loads().items()}

    def router_log(self) -> str:
        """Return the output of all routers."""
        return "".join(p.read_text(errors="replace") for p in sorted(self.logs.glob("*router.log")))


def with_proxies(shape: Shape) -> Shape:
    """Return a shape with one worker of each role and every hop through a proxy."""
    return replace(shape, prefills=1, decodes=1, proxied=True)


def lasting_port() -> int:
    """Return a free port that no connection gets while its router is down, which could happen with
    port 0.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(first // 2, first), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port below those of connections")


def _listened(pid: int) -> set[int]:
    found = psutil.Process(pid).net_connections(kind="tcp")
    return {c.laddr.port for c in found if c.status == psutil.CONN_LISTEN}
