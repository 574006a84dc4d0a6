"""The processes of a measurement: those of pdserve, and fakes with the same certificates."""

import os
import select
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import grpc
import psutil
from systems.chaos.cluster import lasting_port
from systems.eventually import wait_until
from systems.single_processes import files_of, make_certificates, trusted

from pdserve.protos.router_pb2 import FleetView, GetFleetRequest
from pdserve.protos.router_pb2_grpc import RouterStub
from pdserve.services.common.auth.certificates import Role

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
END_S = 30.0
GIVES_WAY = 19  # fakes represent other machines: they must not keep the router from its core


class Processes:
    """A set of processes: `with Processes(folder)` stops all of them at its end. Their standard
    error goes to a file of the folder. `nice`: of the fakes; beside other work they need 0, else
    they starve."""

    def __init__(self, folder: Path, nice: int = GIVES_WAY) -> None:
        self.folder = folder
        self._nice = nice
        self.certificates = folder / "certificates"
        self._stack = ExitStack()
        self._count = 0

    def __enter__(self) -> "Processes":
        make_certificates(self.certificates)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a process with pipes."""
        self._count += 1
        places = os.pathsep.join([str(HERE.parent), str(ROOT / "tests/support")])
        with (self.folder / f"{self._count}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                env=os.environ | {"PYTHONPATH": places, "PDSERVE_DRAIN_S": "0"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._stack.callback(stop, process)
        return process

    def fake(self, script: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a script of this folder."""
        process = self.start(sys.executable, str(HERE / script), str(self.certificates), *words)
        if self._nice:
            psutil.Process(process.pid).nice(self._nice)
        return process

    def words(self, role: Role) -> list[str]:
        """The options by which a process of pdserve is known to the others."""
        authority, own, key = files_of(self.certificates, role)
        return ["--cluster-ca", authority, "--cluster-cert", own, "--cluster-key", key]

    def fleet(self, router: str) -> FleetView | None:
        """The fleet as a router knows it; None while it does not answer."""
        access = trusted(self.certificates, Role.GATEWAY)
        with access.open_blocking_channel(router, Role.ROUTER) as channel:
            try:
                return RouterStub(channel).GetFleet(GetFleetRequest(), timeout=5)
            except grpc.RpcError:
                return None

    def wait_joined(self, router: str, count: int, limit_s: float = 90.0) -> None:
        """Wait until a router knows this many live workers."""

        def joined() -> bool:
            view = self.fleet(router)
            return view is not None and sum(w.state == "live" for w in view.workers) == count

        wait_until(joined, f"{count} workers at {router}", limit_s, 0.25)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process, in an orderly way if possible."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def read_line(process: subprocess.Popen[bytes], limit_s: float) -> bytes:
    """The next line that it prints; empty on a timeout."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], limit_s)
    return process.stdout.readline() if ready else b""


def free_address() -> str:
    """An address that the kernel gives to no other process."""
    return f"127.0.0.1:{lasting_port()}"


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, over all its threads."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def memory_mib(pid: int) -> float:
    """Resident memory."""
    return float(psutil.Process(pid).memory_info().rss) / (1 << 20)
