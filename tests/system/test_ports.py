"""The third table of docs/security.md: listeners and files other than HTTP and gRPC. Runs the
processes as containers do and checks what strangers and other users can reach."""

import os
import re
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from fakes.kv_peer import admitted, guessed
from grpc_health.v1 import health_pb2, health_pb2_grpc
from oracles.rights_tables import LISTENERS, METHODS, status
from systems.another_user import tried_by_another_user
from systems.listening import listening
from systems.single_processes import WORKERS
from systems.whole import BACKENDS, KEY, KEY_SHOWN, MARK, PROBED, SECRET, WholeSystem

from pdserve.engine.handoff.protocol import messages
from pdserve.engine.handoff.recorder.ring import read_ring
from pdserve.services.common.auth.certificates import Role

TRANSPORTS = ("tcp", "shm")
SHOWN: dict[tuple[str, str], str] = {}
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def shows(what: str, who: str) -> Callable[[Any], Any]:
    """Mark a test as the proof of a table row, given by its first and its last cell."""

    def note(test: Any) -> Any:
        SHOWN[what, who] = test.__name__
        return test

    return note


@pytest.fixture(scope="module", autouse=True)
def rings() -> None:
    """Override the autouse fixture: `system` checks its rings itself."""


def options_of(what: str) -> str:
    """Return the option that the first cell of a row names."""
    (option,) = re.findall(r"`(--[\w-]+)`", what)
    return str(option)


def test_every_row_has_a_test() -> None:
    assert {(what, who) for what, _, who in LISTENERS} == set(SHOWN)
    assert set(SHOWN.values()) <= set(globals())


def test_every_listener_is_in_a_table(system: WholeSystem) -> None:
    """Also checks that every entry of the third table exists at the roles that it lists."""
    places = system.places()
    table = {options_of(what): set(at.split(", ")) for what, at, _ in LISTENERS}
    assert table == {option: set(by_role) for option, by_role in places.items()}
    del places["--trace-dir"]  # files, no listener
    known: dict[str, set[str]] = {role: {system.address[role]} for role in PROBED}
    known[Role.GATEWAY] = {system.http, system.grpc}
    for role in known:
        named = {by_role[role] for by_role in places.values() if role in by_role}
        assert listening(system.parent(role)) == known[role] | named, role


@shows("KV port (`--data-bind`)", "the worker with the ticket of a hand-off")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_without_a_ticket_no_claim_is_granted(system: WholeSystem, transport: str) -> None:
    """The client knows everything that a worker says about itself, and even a ticket's id."""
    incarnation, thief = os.urandom(16), os.urandom(16)
    credentials = system.access(Role.ROUTER)
    address = system.address[Role.DECODE]
    with (
        credentials.open_blocking_channel(address, Role.DECODE) as channel,
        admitted(channel, incarnation) as ticket,
    ):
        with system.peer(transport, incarnation) as peer:
            assert isinstance(peer.welcome, messages.Welcome)
            unknown = guessed(system.decode, incarnation)
            assert peer.claim(unknown) == messages.Gone(unknown.id)
        with system.peer(transport, incarnation) as peer:
            assert peer.claim(guessed(system.decode, incarnation, ticket.id)) is None, (
                "a claim with a wrong secret was answered"
            )
        with system.peer(transport, thief) as peer:
            assert peer.claim(ticket) is None, "a claim with another process's ticket was answered"
        with system.peer(transport, incarnation) as peer:
            peer.send_frame()
            assert peer.reply() is None, "a frame without a ticket was answered"
        with system.peer(transport, incarnation) as peer:
            assert isinstance(peer.claim(ticket), messages.Granted)


def test_an_introduction_alone_grants_nothing(system: WholeSystem) -> None:
    """The worker neither answers nor waits for a peer that sends nothing after its introduction."""
    with system.peer("tcp", os.urandom(16)) as one, system.peer("shm", os.urandom(16)) as other:
        assert one.reply() is None
        assert other.reply() is None


def is_private(path: Path) -> bool:
    found = path.stat()
    return found.st_mode & 0o777 == 0o600 and found.st_uid == os.geteuid()


@shows(
    "unix sockets of `shm` and `cuda_ipc` (`--shm-dir`)",
    "processes of the same user, with a ticket",
)
def test_the_socket_is_private_to_its_user(system: WholeSystem) -> None:
    """The tests above check what this user can do without a ticket."""
    assert system.unix.is_socket()
    assert is_private(system.unix)


def shared_memory(process: psutil.Process) -> list[Path]:
    """Return the file descriptors of a process's shared memory."""
    folder = Path(f"/proc/{process.pid}/fd")
    return [path for path in folder.iterdir() if os.readlink(path).startswith("/memfd:")]


@pytest.mark.parametrize("role", WORKERS)
def test_the_shared_memory_has_no_name(system: WholeSystem, role: Role) -> None:
    """Only processes that received the descriptor can open it."""
    process = system.parent(role)
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "/memfd:pdserve-kv (deleted)" in maps
    assert "/dev/shm" not in maps
    assert shared_memory(process)


@root_only
def test_another_user_can_open_no_file_or_socket(system: WholeSystem) -> None:
    """Tries sockets, rings, keys, and the /proc entries of the processes that lead to their
    memory."""
    closed = [system.unix, *system.rings.iterdir(), *system.certificates.glob("*-key.pem")]
    parents = [system.parent(role) for role in Role]
    for process in (*parents, *(child for one in parents for child in one.children())):
        names = ("fd", "mem", "maps", "environ", "map_files")
        closed += [Path(f"/proc/{process.pid}") / name for name in names]
        closed += shared_memory(process)
    open_file = system.rings / "open"
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(system.folder / "control"))
        control.listen()
        (system.folder / "control").chmod(0o666)
        open_file.write_bytes(b"open")
        open_file.chmod(0o644)
        try:
            found = tried_by_another_user([*closed, open_file, system.folder / "control"])
        finally:
            open_file.unlink()
    reached = [path for path, outcome in found.items() if outcome == "reached"]
    assert reached == [open_file, system.folder / "control"], (
        "only the two files opened for comparison may be reached"
    )
    assert {found[path] for path in closed} == {"PermissionError"}
    assert len(closed) > 3 + 5 * len(Role)


def secrets_in(data: bytes) -> list[str]:
    """Return the words of the prompt, the client's key, the cluster's secret and private keys found
    in data."""
    words = (*MARK.split(), KEY, SECRET, "PRIVATE KEY")
    return [word for word in words if word.encode() in data]


@shows("rings of events (`--trace-dir`)", "the same user; they hold no prompt and no secret")
@pytest.mark.parametrize("role", BACKENDS)
def test_a_ring_holds_no_prompt_and_no_secret(system: WholeSystem, role: Role) -> None:
    path = system.ring(role)
    assert is_private(path)
    assert read_ring(path).records, "the ring has no record of the hand-off"
    data, ids = path.read_bytes(), system.mark_ids()
    assert secrets_in(data) == []
    assert len(ids) > 3
    assert not any(struct.pack(f"<{len(ids)}{kind}", *ids) in data for kind in "HIQ")


@shows(
    "metrics port (`--metrics-port`)",
    "everybody; no prompt and no secret is in it, but addresses are",
)
@pytest.mark.parametrize("role", PROBED)
def test_a_metrics_port_serves_only_metrics(system: WholeSystem, role: str) -> None:
    with httpx.Client(base_url=f"http://{system.metrics[role]}") as client:
        answer = client.get("/metrics")
        assert answer.status_code == 200
        assert "pdserve_" in answer.text
        assert role not in WORKERS or system.address[role] in answer.text
        assert secrets_in(answer.content) == []
        for path in ("/", "/health", "/metrics/", "/v1/models", "/debug", "/..%2fmetrics"):
            assert client.get(path).status_code == 404
        for method in ("POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"):
            assert client.request(method, "/metrics").status_code == 501


def test_the_gateway_metrics_contain_no_secret(system: WholeSystem) -> None:
    answer = httpx.get(f"http://{system.http}/metrics", headers=KEY_SHOWN)
    assert "pdserve_prefill_requests_total" in answer.text
    assert secrets_in(answer.content) == []


@shows("probe port (`--probe-port`)", "everybody; it answers health checks and nothing else")
@pytest.mark.parametrize("role", PROBED)
def test_a_probe_port_answers_only_health_checks(system: WholeSystem, role: str) -> None:
    with grpc.insecure_channel(system.probes[role]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        assert stub.Check(request, timeout=20).status == health_pb2.HealthCheckResponse.SERVING
        for method, _, _ in METHODS:
            checks = method.startswith("grpc.health.")
            wanted = grpc.StatusCode.OK if checks else grpc.StatusCode.UNIMPLEMENTED
            assert status(channel, method) is wanted, method
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://{system.probes[role]}/metrics")
