"""The authority of a cluster changes under load, by the steps of docs/security.md.

No request fails, and a sniffer reads no plain text between processes.
"""

import asyncio
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import grpc
import httpx
import pytest
from builders.tiny_models import write_tiny
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from systems.eventually import eventually
from systems.single_processes import SingleProcesses, files_of, make_certificates, replace_file
from systems.sniffer import Sniffer, may_sniff
from systems.steady_load import Ask, Load, RawClient

from pdserve.protos.common_pb2 import SamplingParams, Start
from pdserve.protos.router_pb2 import GenerateRequest
from pdserve.protos.router_pb2_grpc import RouterStub
from pdserve.services.common.auth.access import TlsAccess
from pdserve.services.common.auth.certificates import Role

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]

MODEL = "tiny"
MARK = "xylophone quagmire"
IDS = list(range(40, 70))
METHODS = b"pdserve.v1."
PROMPTS = [Ask(f"{n} {MARK} " * 15, 40) for n in range(3)] + [Ask(f"{n} {MARK}", 200) for n in "ab"]
CLIENTS = 4
SERVERS = (Role.ROUTER, Role.PREFILL, Role.DECODE)
SESSIONS = 5  # the gateway's with the router, and each worker's: its own, and the router's
STEP_S = 120.0


def reset_sessions(system: SingleProcesses) -> int:
    """Reset the gRPC connections between the processes; return their number."""
    ports = " or ".join(f"sport = :{system.address[role].split(':')[1]}" for role in SERVERS)
    command = ["ss", "-KHtn", "state", "established", f"( {ports} )"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return len(done.stdout.splitlines())


def num_accepting(system: SingleProcesses, certificates: Path, authorities: Path) -> int:
    """Return the number of servers that accept the certificates of a folder and show one of these
    authorities.
    """

    def accepts(role: Role) -> bool:
        caller = Role.GATEWAY if role is Role.ROUTER else Role.ROUTER
        _, certificate, key = files_of(certificates, caller)
        access = TlsAccess(str(authorities), certificate, key)
        with access.open_blocking_channel(system.address[role], role) as channel:
            try:
                HealthStub(channel).Check(HealthCheckRequest(), timeout=20)
            except grpc.RpcError:
                return False
        return True

    return sum(map(accepts, SERVERS))


class AuthorityChange:
    """The steps of a change, each under load. `accepted`: after each step, the numbers of servers
    that accept the old certificates, and the new ones. `reset`: the connections that each step has
    reset, because files concern only new ones.
    """

    def __init__(self, system: SingleProcesses, load: Load) -> None:
        self.accepted: list[tuple[int, int]] = []
        self.reset: list[int] = []
        self._system, self._load = system, load
        self._live = system.certificates
        self._old, self._new = system.folder / "old", system.folder / "new"
        make_certificates(self._new)
        self._old.mkdir()
        for file in self._live.iterdir():
            shutil.copy(file, self._old)
        self._both = system.folder / "both.pem"
        self._both.write_text("".join((f / "ca.pem").read_text() for f in (self._old, self._new)))

    async def run(self) -> None:
        await self._step("both", lambda: self._trust(self._both))
        for role in Role:
            await self._step(role, lambda role=role: self._renew(role))
        await self._step("new", lambda: self._trust(self._new / "ca.pem"))

    def _trust(self, authorities: Path) -> None:
        replace_file(self._live / "ca.pem", authorities.read_bytes())

    def _renew(self, role: Role) -> None:
        for name in (f"{role}-key.pem", f"{role}.pem"):
            replace_file(self._live / name, (self._new / name).read_bytes())

    async def _step(self, name: str, change: Callable[[], None]) -> None:
        load = self._load
        await eventually(lambda: load.running, "streams under way", STEP_S)
        load.where = name
        change()
        self.reset.append(reset_sessions(self._system))
        enough = load.completed + 2 * CLIENTS
        await eventually(
            lambda: load.completed >= enough or load.failed or load.broken, "answers", STEP_S
        )
        old = await asyncio.to_thread(num_accepting, self._system, self._old, self._both)
        new = await asyncio.to_thread(num_accepting, self._system, self._new, self._new / "ca.pem")
        self.accepted.append((old, new))


@pytest.mark.skipif(not may_sniff(), reason="only root may read the packets of other processes")
@pytest.mark.skipif(shutil.which("ss") is None, reason="no ss (Debian: iproute2)")
def test_a_change_of_authority_under_load_shows_nothing_and_fails_no_request(
    tmp_path: Path,
) -> None:
    model = write_tiny(tmp_path / MODEL, "llama", max_position_embeddings=2048)
    worker = ("--model", str(model), "--kv-tokens", "16384", "--threads", "1")
    worker += ("--kv-transport", "tcp", "--encrypt-kv")
    with Sniffer() as sniffer, SingleProcesses(tmp_path) as system:
        outside, http, kv = (system.new_address() for _ in range(3))
        system.start(Role.ROUTER, "--client-bind", outside, "--remote-prefill-threshold", "100")
        system.start(Role.PREFILL, *worker)
        system.start(Role.DECODE, *worker, "--data-bind", kv)
        system.start(Role.GATEWAY, "--port", http.split(":")[1])
        system.wait_joined()
        system.wait_for(lambda: is_ready(http), "the gateway")
        change, load = asyncio.run(change_authority(system, f"http://{http}"))
        generate(outside)
        num_remote = system.fleet().prefill_remote
    assert (load.failed, load.broken, load.unequal) == ([], [], 0)
    assert change.accepted == [(3, 0), (3, 0), (3, 1), (3, 2), (3, 3), (0, 3)]
    assert min(change.reset) >= SESSIONS
    assert num_remote > 2 * len(change.reset), "too few prompts were handed off"

    assert not sniffer.num_dropped
    ids = Start(prompt_ids=IDS).SerializeToString()[2:]
    assert MARK.encode() in sniffer.passed(http), "clients without TLS: the sniffer reads this"
    shown = sniffer.passed(outside)
    assert METHODS in shown
    assert ids in shown
    for place in (*(system.address[role] for role in SERVERS), kv):
        sealed = sniffer.passed(place)
        assert len(sealed) > 10_000, "the sniffer has seen no traffic there"
        assert not [text for text in (MARK.encode(), METHODS, ids) if text in sealed]


async def change_authority(system: SingleProcesses, url: str) -> tuple[AuthorityChange, Load]:
    client = RawClient(url, "none")
    load = Load(client.chunks, MODEL)
    change = AuthorityChange(system, load)
    await load.learn(PROMPTS)
    clients = asyncio.create_task(load.run(CLIENTS))
    try:
        await change.run()
    finally:
        load.stop()
        await clients
        await client.close()
    return change, load


def is_ready(gateway: str) -> bool:
    try:
        return httpx.get(f"http://{gateway}/ready").is_success
    except httpx.HTTPError:
        return False


def generate(address: str) -> None:
    """Send IDS to the router's port for clients, in plain text."""
    params = SamplingParams(temperature=0, max_tokens=2)
    with grpc.insecure_channel(address) as channel:
        request = GenerateRequest(prompt_ids=IDS, params=params)
        assert list(RouterStub(channel).Generate(request, timeout=60))
