"""Routers, gateways and workers that a test starts and stops one by one, as an operator replaces
them: each a process with its own command line, and its own interpreter if it is of another
release.
"""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from pdserve.protos import router_pb2
from pdserve.protos.router_pb2_grpc import RouterStub
from systems.chaos.cluster import lasting_port
from systems.cluster_secret import BEARER, SECRET
from systems.eventually import wait_until

# The entry point by its name: other releases have its module in another place.
PDSERVE = """
import sys
from importlib.metadata import entry_points
(pdserve,) = entry_points(group="console_scripts", name="pdserve")
sys.exit(pdserve.load()())
"""
START_S = 600.0  # for a busy machine
DRAIN_S = 600.0  # longer than any stream; a drain ends when the last one has
QUEUE_S = 600.0  # a busy machine prefills long prompts for minutes


@dataclass(eq=False)
class Replaceable:
    """One process from its start to its end."""

    role: str
    address: str  # of its HTTP server, or of its gRPC server
    popen: "subprocess.Popen[bytes]"
    log: Path
    metrics: str = ""  # URL of its metrics page, of a gateway and a router

    @property
    def url(self) -> str:
        """Return the URL of a gateway."""
        return f"http://{self.address}"

    def stop(self) -> int:
        """Send SIGTERM; return the exit code once its work has ended."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(DRAIN_S)


class ReplaceableSystem:
    """Context manager: `with ReplaceableSystem(folder, *worker_options) as system`; all processes
    end with it.
    """

    def __init__(self, folder: Path, *worker_options: str) -> None:
        self.folder = folder
        self._worker_options = worker_options
        self.routers: list[Replaceable] = []
        self.gateways: list[Replaceable] = []  # that new requests are for
        self.workers: list[Replaceable] = []
        self._started: list[Replaceable] = []

    def __enter__(self) -> "ReplaceableSystem":
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._started:
            process.popen.kill()
            process.popen.wait()

    def _start(self, role: str, address: str, *words: str, python: str) -> Replaceable:
        command = [python, "-P", "-c", PDSERVE, role, *words]
        command += ["--cluster-secret", SECRET, "--drain-s", f"{DRAIN_S:g}"]
        log = self.folder / f"{role}-{len(self._started)}.log"
        with log.open("wb") as out:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                # An LLM of another test has set the number of threads of this process.
                env={n: v for n, v in os.environ.items() if not n.endswith("_NUM_THREADS")},
            )
        self._started.append(Replaceable(role, address, popen, log))
        return self._started[-1]

    def router(self, *words: str, python: str = sys.executable, address: str = "") -> Replaceable:
        """Start one, at the address of one that has ended or another; the gateways and workers
        that are started later know it.
        """
        address = address or f"127.0.0.1:{lasting_port()}"
        port = str(lasting_port())
        own = ("--bind", address, "--metrics-port", port)
        router = self._start("router", address, *own, *words, python=python)
        router.metrics = f"http://127.0.0.1:{port}/metrics"
        self.routers = [r for r in self.routers if r.address != address] + [router]
        wait_until(lambda: self._view(router) is not None, lambda: tail(router), START_S)
        return router

    def gateway(self, python: str = sys.executable) -> Replaceable:
        """Start one; returns when it is ready, and new requests are for it, too."""
        address = f"127.0.0.1:{lasting_port()}"
        host, port = address.split(":")
        words = ("--host", host, "--port", port, "--grpc-port", "0", *self._routers_words())
        words += ("--queue-timeout-s", f"{QUEUE_S:g}")
        gateway = self._start("gateway", address, *words, python=python)
        gateway.metrics = f"{gateway.url}/metrics?fleet=false"
        wait_until(lambda: _ready(gateway), lambda: tail(gateway), START_S)
        self.gateways.append(gateway)
        return gateway

    def worker(self, role: str, *words: str, python: str = sys.executable) -> Replaceable:
        """Start one; returns when every router can send it work."""
        address = f"127.0.0.1:{lasting_port()}"
        own = ("--bind", address, "--threads", "1", *self._routers_words())
        worker = self._start(role, address, *own, *self._worker_options, *words, python=python)
        self.workers.append(worker)
        wait_until(lambda: self._joined(worker), lambda: tail(worker), START_S)
        return worker

    def _routers_words(self) -> tuple[str, ...]:
        return tuple(word for router in self.routers for word in ("--routers", router.address))

    def retire(self, process: Replaceable) -> int:
        """Stop one; returns its exit code, once its work has ended and every router has forgotten
        it.
        """
        for group in (self.routers, self.gateways, self.workers):
            if process in group and process.role != "router":  # its successor has its address
                group.remove(process)
        code = process.stop()
        if process.role in ("prefill", "decode"):
            wait_until(lambda: not any(self._knows(r, process) for r in self.routers), process.role)
        return code

    def wait_joined(self) -> None:
        """Wait until every router can send work to all workers."""
        wait_until(lambda: all(map(self._joined, self.workers)), "workers joined", START_S)

    def wait_draining(self, worker: Replaceable) -> None:
        """Wait until every router knows that the worker takes nothing new, or has forgotten it."""

        def states() -> set[str]:
            views = [self._view(router) for router in self.routers]
            found = {(v.state, v.hello.address) for view in views if view for v in view.workers}
            return {state for state, address in found if address == worker.address}

        wait_until(lambda: states() <= {"draining"}, states, START_S)

    def view(self) -> router_pb2.FleetView:
        """Return the fleet as the first router knows it."""
        return self._seen_by(self.routers[0])

    def _seen_by(self, router: Replaceable) -> router_pb2.FleetView:
        found = self._view(router)
        assert found is not None, tail(router)
        return found

    def remote_prefills(self) -> int:
        """Return the prompts handed from prefill to decode since the running routers began."""
        return sum(self._seen_by(router).prefill_remote for router in self.routers)

    def protocols(self) -> list[int]:
        """Return versions of the workers, each once."""
        return sorted({w.hello.protocol for w in self.view().workers})

    def build(self, process: Replaceable) -> dict[str, str]:
        """Return the build that a gateway or router reports."""
        page = httpx.get(process.metrics, timeout=START_S).raise_for_status().text
        samples = (s for family in text_string_to_metric_families(page) for s in family.samples)
        return next(s.labels for s in samples if s.name == "pdserve_build_info")

    def _view(self, router: Replaceable) -> router_pb2.FleetView | None:
        if router.popen.poll() is not None:
            raise RuntimeError(f"router ended with {router.popen.returncode}: {tail(router)}")
        try:
            with grpc.insecure_channel(router.address) as channel:
                stub = RouterStub(channel)
                return stub.GetFleet(router_pb2.GetFleetRequest(), metadata=BEARER, timeout=5)
        except grpc.RpcError:
            return None

    def _knows(self, router: Replaceable, worker: Replaceable) -> bool:
        view = self._view(router)
        return view is None or any(w.hello.address == worker.address for w in view.workers)

    def _joined(self, worker: Replaceable) -> bool:
        if worker.popen.poll() is not None:
            raise RuntimeError(f"{worker.role} ended: {tail(worker)}")
        views = [self._view(router) for router in self.routers]
        return all(v and worker.address in [w.hello.address for w in v.workers] for v in views)


def _ready(gateway: Replaceable) -> bool:
    if gateway.popen.poll() is not None:
        raise RuntimeError(f"gateway ended: {tail(gateway)}")
    try:
        return httpx.get(f"{gateway.url}/ready", timeout=5).is_success
    except httpx.HTTPError:
        return False


def tail(process: Replaceable) -> str:
    """Return the end of its output."""
    return process.log.read_text(errors="replace")[-3000:]
