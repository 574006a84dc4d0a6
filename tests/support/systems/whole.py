"""A whole system of single processes that covers every row of docs/security.md."""

from contextlib import closing
from itertools import count
from pathlib import Path

import grpc
import httpx
import psutil
from fakes.kv_peer import KvPeer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.engine.handoff.recorder import SUFFIX
from pdserve.protos import fleet_pb2
from pdserve.services.common.auth.certificates import Role
from systems.single_processes import PICKER, WORKERS, SingleProcesses

MODEL = "SmolLM2-135M-Instruct"
MARK = "xylophone quagmire"  # in every prompt
KEY = "sk-the-key-of-the-client"
KEY_SHOWN = {"authorization": f"Bearer {KEY}"}
SECRET = "the-secret-of-the-cluster-that-nobody-may-see"
BACKENDS = (Role.ROUTER, *WORKERS)
PROBED = (*BACKENDS, PICKER)  # roles with a metrics port and a probe port


class WholeSystem(SingleProcesses):
    """A system with every port, socket and file of the tables. The folders of sockets and rings
    are open to all users, so that only the permissions of the files themselves protect them.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.rings, self.shm = folder / "rings", folder / "shm"
        self.rings.mkdir()
        self.shm.mkdir()
        self.metrics = {role: self.new_address() for role in PROBED}
        self.probes = {role: self.new_address() for role in PROBED}
        self.kv, self.http, self.grpc = (self.new_address() for _ in range(3))
        self._asked = count()

    def start_all(self) -> None:
        """Start all; returns when a prompt has been handed off by shared memory."""
        for role in BACKENDS:
            words = ["--cluster-secret", SECRET, "--trace-dir", str(self.rings)]
            words += self._ports(role)
            if role is Role.ROUTER:
                words += ["--remote-prefill", "always", "--api-key", KEY]
            else:
                words += ["--kv-tokens", "4096", "--threads", "1", "--shm-dir", str(self.shm)]
            if role is Role.DECODE:
                words += ["--data-bind", self.kv]
            self.start(role, *words)
        ports = ["--port", self.http.split(":")[1], "--grpc-port", self.grpc.split(":")[1]]
        keys = ["--api-key", KEY, "--cluster-secret", SECRET]
        self.start(Role.GATEWAY, *ports, *keys)
        self.start(PICKER, "--endpoints", self.http, *self._ports(PICKER), *keys)
        self.wait_joined()
        self.wait_for(self._handed_off, "a hand-off")
        self.wait_for(self._picker_serves, "the picker")

    def _ports(self, role: str) -> list[str]:
        metrics, probes = (at[role].split(":")[1] for at in (self.metrics, self.probes))
        return ["--metrics-port", metrics, "--probe-port", probes]

    def _picker_serves(self) -> bool:
        with grpc.insecure_channel(self.probes[PICKER]) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            try:
                answer = check(health_pb2.HealthCheckRequest(), timeout=5)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _handed_off(self) -> bool:
        """Check that a prompt with the mark has gone through all of them."""
        prompt = f"{next(self._asked)} {MARK} " * 50
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
        url = f"http://{self.http}/v1/completions"
        try:
            answer = httpx.post(url, json=body, headers=KEY_SHOWN, timeout=60)
        except httpx.ConnectError:
            return False
        return answer.status_code == 200 and self.fleet().prefill_remote > 0

    def mark_ids(self) -> list[int]:
        """Return the tokens of the mark, as in a prompt."""
        body = {"model": MODEL, "prompt": f" {MARK}"}
        answer = httpx.post(f"http://{self.http}/tokenize", json=body, headers=KEY_SHOWN)
        return [int(token) for token in answer.json()["tokens"]]

    @property
    def decode(self) -> fleet_pb2.WorkerHello:
        """Return everything that decode reports about itself."""
        return self.hello(Role.DECODE)

    @property
    def unix(self) -> Path:
        """Return decode's socket."""
        (path,) = self.shm.iterdir()
        return path

    def ring(self, role: Role) -> Path:
        (path,) = self.rings.glob(f"{role}-*{SUFFIX}")
        return path

    def places(self) -> dict[str, dict[str, str]]:
        """Return by option and command the addresses and files that the table names."""
        return {
            "--data-bind": {Role.DECODE: self.kv},
            "--shm-dir": {Role.DECODE: str(self.unix)},
            "--trace-dir": {role: str(self.ring(role)) for role in BACKENDS},
            "--metrics-port": self.metrics,
            "--probe-port": self.probes,
        }

    def parent(self, role: str) -> psutil.Process:
        """Return the process of a role; the gateway has children."""
        return psutil.Process(self.processes[role].pid)

    def peer(self, transport: str, incarnation: bytes) -> "closing[KvPeer]":
        """Return a peer that has introduced itself to decode with that incarnation."""
        return closing(KvPeer(self.decode, transport, str(self.shm), incarnation))
