"""Authentication between processes of a cluster: certificates with roles, or a secret."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc
from systems.chaos.cluster import lasting_port
from systems.eventually import LIMIT_S

from pdserve.protos import common_pb2 as pb
from pdserve.protos.common_pb2_grpc import BlobsServicer, BlobsStub, add_BlobsServicer_to_server
from pdserve.protos.fleet_pb2 import JoinReply, WorkerReport
from pdserve.protos.fleet_pb2_grpc import FleetServicer, FleetStub, add_FleetServicer_to_server
from pdserve.protos.router_pb2 import (
    FleetView,
    GatewayMessage,
    GetFleetRequest,
    PickReply,
    PickRequest,
)
from pdserve.protos.router_pb2_grpc import RouterServicer, RouterStub, add_RouterServicer_to_server
from pdserve.protos.worker_pb2 import DecodeCommand, PrefillCommand
from pdserve.protos.worker_pb2_grpc import (
    DecodeServicer,
    DecodeStub,
    PrefillServicer,
    PrefillStub,
    add_DecodeServicer_to_server,
    add_PrefillServicer_to_server,
)
from pdserve.services.common.auth import access as access_module
from pdserve.services.common.auth.access import (
    REPLACING_S,
    SecretAccess,
    TlsAccess,
    TlsFiles,
    make_access,
    make_tls,
)
from pdserve.services.common.auth.certificates import (
    RIGHTS,
    Identity,
    Role,
    certificate_settings,
    issue,
    make_authority,
    role_in,
)
from pdserve.services.common.options import ServerSettings
from pdserve.services.common.server import HEALTH_CHECK, GrpcServer

pytestmark = pytest.mark.anyio
AUTHORITY = make_authority()
SERVICE_METHODS = {
    method: roles for method, roles in RIGHTS.items() if method.startswith("/pdserve.")
}


class Everything(FleetServicer, RouterServicer, BlobsServicer, DecodeServicer, PrefillServicer):
    """Answers every method of the cluster once, and records the called methods."""

    def __init__(self) -> None:
        self.called: list[str] = []

    async def Join(self, requests: Any, context: Any) -> AsyncIterator[JoinReply]:
        self.called.append("Fleet/Join")
        async for _ in requests:
            pass
        yield JoinReply()

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        self.called.append("Session")
        async for _ in requests:
            pass
        return
        yield

    async def Pick(self, request: Any, context: Any) -> PickReply:
        self.called.append("Router/Pick")
        return PickReply()

    async def GetFleet(self, request: Any, context: Any) -> FleetView:
        self.called.append("Router/GetFleet")
        return FleetView()

    async def GetBlob(self, request: Any, context: Any) -> AsyncIterator[pb.BlobChunk]:
        self.called.append("Blobs/GetBlob")
        yield pb.BlobChunk()


def access_of(role: Role, authority: Identity = AUTHORITY) -> TlsAccess:
    found = make_access(ServerSettings(**certificate_settings(authority, role)))
    assert isinstance(found, TlsAccess)
    return found


@pytest.fixture
async def server(anyio_backend: str) -> AsyncIterator[tuple[Everything, str]]:
    """Run every service in one server, with the certificate of a router."""
    host, everything = GrpcServer(access_of(Role.ROUTER)), Everything()
    for add in (
        add_FleetServicer_to_server,
        add_RouterServicer_to_server,
        add_BlobsServicer_to_server,
        add_DecodeServicer_to_server,
        add_PrefillServicer_to_server,
    ):
        add(everything, host.server)
    port = host.listen("127.0.0.1:0")
    await host.start()
    yield everything, f"127.0.0.1:{port}"
    await host.stop(0)


def call(channel: Any, method: str) -> Any:
    """Call the method with a first message."""
    calls = {
        "/pdserve.v1.Fleet/Join": lambda: FleetStub(channel).Join(iter([WorkerReport()])),
        "/pdserve.v1.Router/Session": lambda: RouterStub(channel).Session(iter([GatewayMessage()])),
        "/pdserve.v1.Router/GetFleet": lambda: RouterStub(channel).GetFleet(GetFleetRequest()),
        "/pdserve.v1.Router/Pick": lambda: RouterStub(channel).Pick(PickRequest()),
        "/pdserve.v1.Blobs/GetBlob": lambda: BlobsStub(channel).GetBlob(pb.BlobRequest()),
        "/pdserve.v1.Prefill/Session": lambda: PrefillStub(channel).Session(
            iter([PrefillCommand()])
        ),
        "/pdserve.v1.Decode/Session": lambda: DecodeStub(channel).Session(iter([DecodeCommand()])),
        HEALTH_CHECK: lambda: health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest()
        ),
    }
    return calls[method]()


async def status(channel: grpc.Channel, method: str) -> grpc.StatusCode:
    """Return the status that answers a call of the method. Uses a blocking channel, since
    grpc.aio's reports INTERNAL if an answer comes while it still writes.
    """

    def answered() -> grpc.StatusCode:
        try:
            answer = call(channel, method)
            for _ in answer if hasattr(answer, "__iter__") else ():
                pass
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    return await asyncio.wait_for(asyncio.to_thread(answered), LIMIT_S)


async def status_of(answer: Any) -> grpc.StatusCode:
    try:
        async with asyncio.timeout(10):
            if hasattr(answer, "__aiter__"):
                async for _ in answer:
                    pass
            else:
                await answer
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("role", Role)
async def test_a_role_may_call_only_its_methods(server: Any, role: Role) -> None:
    everything, address = server
    with access_of(role).open_blocking_channel(address, Role.ROUTER) as channel:
        for method, allowed in SERVICE_METHODS.items():
            everything.called.clear()
            found = await status(channel, method)
            if role in allowed:
                assert found is grpc.StatusCode.OK, method
            else:
                assert found is grpc.StatusCode.PERMISSION_DENIED, method
            assert bool(everything.called) == (role in allowed)


async def test_every_method_of_the_cluster_has_a_row(server: Any) -> None:
    """A method without a row is for people or probes."""
    of_people = {"Generate", "ListModels", "Chat", "Complete"}
    from pdserve.protos import common_pb2, fleet_pb2, router_pb2, text_pb2, worker_pb2

    methods = {
        f"/{service.full_name}/{method.name}"
        for module in (common_pb2, fleet_pb2, router_pb2, text_pb2, worker_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if method.name not in of_people
    }
    assert methods == set(SERVICE_METHODS)


async def test_an_unknown_client_is_refused_by_tls(server: Any) -> None:
    """Covers no certificate, one of another authority, and plain text."""
    everything, address = server
    foreign = access_of(Role.GATEWAY, make_authority())
    credentials = grpc.ssl_channel_credentials(AUTHORITY.certificate)
    name = [("grpc.ssl_target_name_override", Role.ROUTER.dns_name)]
    for channel in (
        foreign.open_blocking_channel(address, Role.ROUTER),
        grpc.secure_channel(address, credentials, options=name),
        grpc.insecure_channel(address),
    ):
        with channel:
            for method in (*SERVICE_METHODS, HEALTH_CHECK):
                assert await status(channel, method) is grpc.StatusCode.UNAVAILABLE
    assert not everything.called


async def test_a_process_of_another_role_is_not_connected_to(server: Any) -> None:
    """Whatever a name resolves to, a router that looks for a decode worker does not accept this
    server.
    """
    everything, address = server
    async with access_of(Role.ROUTER).open_channel(address, Role.DECODE) as channel:
        status = await status_of(call(channel, "/pdserve.v1.Blobs/GetBlob"))
    assert status is grpc.StatusCode.UNAVAILABLE
    assert not everything.called


async def test_a_probe_needs_no_certificate_and_reaches_nothing_else(anyio_backend: str) -> None:
    open_method = "/pdserve.v1.Router/Generate"
    host, everything = GrpcServer(access_of(Role.ROUTER), [open_method]), Everything()
    add_RouterServicer_to_server(everything, host.server)
    port = lasting_port()
    host.listen_for_probes("127.0.0.1:0", port)
    await host.start()
    host.set_serving(True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert await status_of(stub.Check(health_pb2.HealthCheckRequest())) is grpc.StatusCode.OK
        request = health_pb2.HealthCheckRequest(service="x" * 10_000)
        assert await status_of(stub.Check(request)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        for method in (open_method, "/pdserve.v1.Router/Session"):
            answer = channel.unary_stream(method)(b"")
            assert await status_of(answer) is grpc.StatusCode.UNIMPLEMENTED
    await host.stop(0)
    assert not everything.called


def write(folder: Path, name: str, identity: Identity) -> None:
    (folder / f"{name}.pem").write_bytes(identity.certificate)
    (folder / f"{name}-key.pem").write_bytes(identity.key)


async def test_files_are_reloaded(tmp_path: Path, anyio_backend: str) -> None:
    """An authority is replaced while calls continue: at first both are trusted, then the
    new one.
    """
    old, new = make_authority(), make_authority()
    authorities = tmp_path / "ca.pem"
    authorities.write_bytes(old.certificate)
    write(tmp_path, "router", issue(old, Role.ROUTER))
    write(tmp_path, "gateway", issue(old, Role.GATEWAY))

    def access(role: Role) -> TlsAccess:
        own = (str(tmp_path / f"{role}.pem"), str(tmp_path / f"{role}-key.pem"))
        return TlsAccess(str(authorities), *own)

    host, everything = GrpcServer(access(Role.ROUTER)), Everything()
    add_RouterServicer_to_server(everything, host.server)
    address = f"127.0.0.1:{host.listen('127.0.0.1:0')}"
    await host.start()
    gateway = access(Role.GATEWAY)
    issued_by_old = access_of(Role.GATEWAY, old)

    async def works(one: TlsAccess) -> bool:
        async with one.open_channel(address, Role.ROUTER) as channel:
            answer = await status_of(call(channel, "/pdserve.v1.Router/GetFleet"))
        return answer is grpc.StatusCode.OK

    assert await works(gateway)
    authorities.write_bytes(old.certificate + new.certificate)
    assert await works(gateway)
    write(tmp_path, "gateway", issue(new, Role.GATEWAY))
    assert await works(gateway)
    write(tmp_path, "router", issue(new, Role.ROUTER))
    assert await works(gateway)
    authorities.write_bytes(new.certificate)
    assert await works(gateway)
    assert not await works(issued_by_old)
    await host.stop(0)


def test_a_server_takes_new_files_only_if_they_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC frees what it had for the old files, and a connection on another thread may be about to
    use it: reloading for each connection crashed a router that 100 workers joined at once.
    """
    authority = make_authority()
    write(tmp_path, "router", issue(authority, Role.ROUTER))
    (tmp_path / "ca.pem").write_bytes(authority.certificate)
    made: list[Any] = []
    monkeypatch.setattr(
        grpc, "dynamic_ssl_server_credentials", lambda *args, **_: made.append(args)
    )
    own = (str(tmp_path / "router.pem"), str(tmp_path / "router-key.pem"))
    TlsFiles(*own, str(tmp_path / "ca.pem")).server_credentials()
    ((first, new_files),) = made
    assert isinstance(first, grpc.ServerCertificateConfiguration)
    assert [new_files(), new_files()] == [None, None]
    for change in ("router", "ca.pem"):
        if change == "router":
            write(tmp_path, "router", issue(authority, Role.ROUTER))
        else:
            (tmp_path / "ca.pem").write_bytes(make_authority().certificate)
        request = time.monotonic()
        assert isinstance(new_files(), grpc.ServerCertificateConfiguration)
        assert time.monotonic() - request >= REPLACING_S, "the earlier call has taken the old files"
        assert new_files() is None
    Path(own[0]).unlink()
    with pytest.raises(OSError):  # gRPC keeps what it has
        new_files()


def test_a_key_without_its_certificate_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The files are replaced one after the other; a new authority is loaded with the old ones."""
    authority = make_authority()
    first, second, third = (issue(authority, Role.ROUTER) for _ in range(3))
    write(tmp_path, "router", first)
    (tmp_path / "ca.pem").write_bytes(authority.certificate)
    certificate, key, trusted = (
        tmp_path / name for name in ("router.pem", "router-key.pem", "ca.pem")
    )
    requests: list[Any] = []
    make = "dynamic_ssl_server_credentials"
    monkeypatch.setattr(grpc, make, lambda *args, **_: requests.append(args[1]))
    monkeypatch.setattr(access_module, "configuration", lambda pair, authority: (pair, authority))
    TlsFiles(str(certificate), str(key), str(trusted)).server_credentials()
    (new_files,) = requests

    key.write_bytes(second.key)
    assert [new_files(), new_files()] == [None, None]
    said = [record.message for record in caplog.records]
    assert said == [
        f"{certificate}: the key does not match the certificate; "
        "the previous certificate stays in use"
    ]
    both = authority.certificate + make_authority().certificate
    trusted.write_bytes(both)
    assert new_files() == ((first.key, first.certificate), both)
    assert new_files() is None
    certificate.write_bytes(second.certificate)
    assert new_files() == ((second.key, second.certificate), both)

    key.write_bytes(third.key)
    arrives = SimpleNamespace(sleep=lambda _: certificate.write_bytes(third.certificate))
    monkeypatch.setattr(access_module, "time", arrives)
    assert new_files() == ((third.key, third.certificate), both), "it came during the pause"


async def test_clients_from_outside_get_another_certificate(
    tmp_path: Path, anyio_backend: str
) -> None:
    """They need no certificate: their methods check an API key."""
    public = make_authority()
    write(tmp_path, "public", issue(public, Role.ROUTER))
    tls = make_tls(str(tmp_path / "public.pem"), str(tmp_path / "public-key.pem"))
    method = "/pdserve.v1.Router/GetFleet"
    host, everything = GrpcServer(access_of(Role.ROUTER), [method]), Everything()
    add_RouterServicer_to_server(everything, host.server)
    port = host.listen_for_clients("127.0.0.1:0", tls)
    await host.start()
    credentials = grpc.ssl_channel_credentials(public.certificate)
    name = [("grpc.ssl_target_name_override", Role.ROUTER.dns_name)]
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options=name) as channel:
        assert await status(channel, method) is grpc.StatusCode.OK
        denied = await status(channel, "/pdserve.v1.Router/Session")
    await host.stop(0)
    assert denied is grpc.StatusCode.PERMISSION_DENIED
    assert everything.called == ["Router/GetFleet"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "--cluster-secret is required"),
        ({"cluster_secret": ("x",)}, "at least 32 bytes"),
        ({"cluster_secret": ("x" * 32, "y")}, "at least 32 bytes"),
        ({"cluster_cert": "c.pem"}, "must be set together"),
        ({"cluster_ca": "a", "cluster_cert": "b", "cluster_key": "/nonexistent"}, "nonexistent"),
    ],
)
def test_untrusted_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, OSError), match=said):
        make_access(ServerSettings(**settings))


def test_an_incomplete_certificate_for_clients_is_refused() -> None:
    with pytest.raises(ValueError, match="must be set together"):
        make_tls("cert.pem", "")
    assert make_tls("", "") is None


async def test_a_secret_can_be_replaced(anyio_backend: str) -> None:
    """The next secret is accepted before any process sends it."""
    old, new = "o" * 32, "n" * 32
    host, everything = GrpcServer(SecretAccess((old, new))), Everything()
    add_RouterServicer_to_server(everything, host.server)
    address = f"127.0.0.1:{host.listen('127.0.0.1:0')}"
    await host.start()
    found = []
    for shown in ((old,), (new, old), (new,), ("x" * 32,)):
        async with SecretAccess(shown).open_channel(address, Role.ROUTER) as channel:
            found.append(await status_of(call(channel, "/pdserve.v1.Router/GetFleet")))
    await host.stop(0)
    assert [status.name for status in found] == ["OK", "OK", "OK", "UNAUTHENTICATED"]


def test_a_certificate_contains_its_role() -> None:
    for role in Role:
        assert role_in(issue(AUTHORITY, role).certificate) is role
    with pytest.raises(ValueError, match="names no role"):
        role_in(AUTHORITY.certificate)


async def served(access: SecretAccess, bind: str) -> None:
    server = GrpcServer(access)
    try:
        server.listen(bind)
    finally:
        await server.stop(0)


BEYOND = ["0.0.0.0:0", "[::]:0", "10.0.0.5:1", "127.example.com:1", "router:1", "127.1:1", ""]


@pytest.mark.parametrize("address", BEYOND)
async def test_a_secret_stays_on_this_machine(anyio_backend: str, address: str) -> None:
    """The secret is neither accepted nor sent elsewhere, and the error names the alternatives."""
    access = SecretAccess(("x" * 32,))
    with pytest.raises(PermissionError, match=r"pdserve certs.*--trust-network"):
        await served(access, address)
    for dial in (access.open_channel, access.open_blocking_channel):
        with pytest.raises(PermissionError, match="not on this machine"):
            dial(address, Role.ROUTER)


async def test_addresses_to_which_a_secret_may_be_sent(tmp_path: Path, anyio_backend: str) -> None:
    access = SecretAccess(("x" * 32,))
    for bind in (
        "127.0.0.1:0",
        "127.0.77.3:0",
        "localhost:0",
        "[::1]:0",
        f"unix:{tmp_path}/socket",
    ):
        await served(access, bind)
        async with access.open_channel(bind, Role.ROUTER):
            pass
    settings = ServerSettings(cluster_secret=("x" * 32,), trust_network=True)
    trusting = make_access(settings)
    assert isinstance(trusting, SecretAccess)
    await served(trusting, "0.0.0.0:0")
    async with trusting.open_channel("router:1", Role.ROUTER):
        pass


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    one, other = issue(AUTHORITY, Role.ROUTER), issue(AUTHORITY, Role.ROUTER)
    write(tmp_path, "own", Identity(one.certificate, other.key))
    own = str(tmp_path / "own.pem"), str(tmp_path / "own-key.pem")
    for use in (make_tls, lambda *pair: TlsAccess(AUTHORITY.certificate.decode(), *pair)):
        with pytest.raises(ValueError, match=r"own\.pem: the key does not match the certificate"):
            use(*own)
    (tmp_path / "own-key.pem").write_text("no key")
    with pytest.raises(ValueError, match="the certificate's key cannot be read"):
        make_tls(*own)
    (tmp_path / "own.pem").write_text("no certificate")
    with pytest.raises(ValueError, match="the certificate cannot be read"):
        make_tls(*own)


def test_a_certificate_made_by_up_lasts_as_long_as_its_authority() -> None:
    ends = [
        x509.load_pem_x509_certificate(pem).not_valid_after_utc
        for pem in (
            AUTHORITY.certificate,
            certificate_settings(AUTHORITY, Role.DECODE)["cluster_cert"].encode(),
        )
    ]
    assert ends[1] >= ends[0]
