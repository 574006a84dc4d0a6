"""A router, workers and a gateway with certificates, each a process with its own command line."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc

from pdserve.protos import fleet_pb2, router_pb2
from pdserve.protos.router_pb2_grpc import RouterStub
from pdserve.services.common.auth.access import TlsAccess
from pdserve.services.common.auth.certificates import Role
from systems.chaos.cluster import lasting_port
from systems.eventually import wait_until

PDSERVE = (sys.executable, "-P", "-m", "pdserve.cli.main")
START_S = 110.0  # for a busy machine
PICKER = "picker"  # it presents a gateway's certificate
WORKERS = {Role.PREFILL: fleet_pb2.PREFILL, Role.DECODE: fleet_pb2.DECODE}


def make_certificates(folder: Path) -> None:
    """Run `pdserve certs`: make an authority and a certificate for each role."""
    subprocess.run([*PDSERVE, "certs", str(folder)], check=True, capture_output=True)


def trusted(folder: Path, role: Role) -> TlsAccess:
    """Return the credentials of a process of that role with the certificates of the folder."""
    return TlsAccess(*files_of(folder, role))


def files_of(folder: Path, role: Role) -> tuple[str, str, str]:
    """Return the authority, the role's certificate and its key."""
    return str(folder / "ca.pem"), str(folder / f"{role}.pem"), str(folder / f"{role}-key.pem")


def replace_file(target: Path, content: bytes) -> None:
    """Replace a file atomically, as `pdserve certs` does."""
    new = target.with_suffix(".new")
    new.write_bytes(content)
    new.replace(target)


class SingleProcesses:
    """`with SingleProcesses(folder) as system` makes the certificates; all processes have ended at
    its end. The output of a process is in the folder, in a file with the name of its role.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.certificates = folder / "certificates"
        self.address: dict[str, str] = {}  # by command
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._given: set[str] = set()

    def __enter__(self) -> "SingleProcesses":
        make_certificates(self.certificates)
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(self, role: str, *words: str) -> None:
        """Start a process of that role, or a picker; the router must be the first."""
        shown = Role.GATEWAY if role == PICKER else Role(role)
        authority, own, key = files_of(self.certificates, shown)
        command = [*PDSERVE, role, *words]
        command += ["--cluster-ca", authority, "--cluster-cert", own, "--cluster-key", key]
        if role != Role.GATEWAY:
            self.address[role] = self.new_address()
            command += ["--bind", self.address[role]]
        if role != Role.ROUTER:
            command += ["--routers", self.address[Role.ROUTER]]
        # An LLM of another test has set the number of threads of this process.
        inherited = {n: v for n, v in os.environ.items() if not n.endswith("_NUM_THREADS")}
        with (self.folder / f"{role}.log").open("wb") as log:
            self.processes[role] = subprocess.Popen(
                command,
                env=inherited | {"PDSERVE_DRAIN_S": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def new_address(self) -> str:
        """Return a free address that neither this class nor the kernel gives to another process."""
        while (address := f"127.0.0.1:{lasting_port()}") in self._given:
            pass
        self._given.add(address)
        return address

    def access(self, role: Role) -> TlsAccess:
        return trusted(self.certificates, role)

    def wait_for(self, holds: Callable[[], object], what: str) -> None:
        """Wait until a condition holds; raises with the log of a process that has ended
        meanwhile.
        """

        def look() -> object:
            for role, process in self.processes.items():
                assert process.poll() is None, (self.folder / f"{role}.log").read_text()
            return holds()

        wait_until(look, what, START_S, 0.05)

    def fleet(self) -> router_pb2.FleetView:
        """Return the router's view. Raises grpc.RpcError while it does not answer."""
        access, router = self.access(Role.GATEWAY), self.address[Role.ROUTER]
        with access.open_blocking_channel(router, Role.ROUTER) as channel:
            return RouterStub(channel).GetFleet(router_pb2.GetFleetRequest(), timeout=5)

    def wait_joined(self) -> None:
        """Wait until the router knows every worker that was started."""
        wanted = sorted(WORKERS[role] for role in self.processes if role in WORKERS)

        def joined() -> bool:
            try:
                return sorted(w.hello.role for w in self.fleet().workers) == wanted
            except grpc.RpcError:
                return False

        self.wait_for(joined, "the workers to join")

    def hello(self, role: Role) -> fleet_pb2.WorkerHello:
        """Return the hello that the worker of that role has sent to the router."""
        (found,) = [w.hello for w in self.fleet().workers if w.hello.role == WORKERS[role]]
        return found
