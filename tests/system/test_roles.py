"""Rights of each role's certificate at a real router, prefill and decode worker: every row of the
table of gRPC methods in docs/security.md, at processes that serve the method and at those that do
not."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import grpc
import pytest
from oracles.rights_tables import METHODS, REFUSED, status
from systems.single_processes import files_of, make_certificates, trusted
from systems.whole import KEY_SHOWN, WholeSystem

from pdserve.protos import fleet_pb2
from pdserve.protos.fleet_pb2_grpc import FleetStub
from pdserve.services.common.auth.access import TlsAccess
from pdserve.services.common.auth.certificates import Role
from pdserve.services.common.server import HEALTH_CHECK

PLACES = (Role.ROUTER, Role.PREFILL, Role.DECODE)
CODE = grpc.StatusCode
# Status codes that an empty message gets from the method itself.
HEARD = (CODE.OK, CODE.INVALID_ARGUMENT, CODE.NOT_FOUND, CODE.FAILED_PRECONDITION)
Channels = dict[tuple[Role, Role], grpc.Channel]


@pytest.fixture(scope="module", autouse=True)
def rings() -> None:
    """Override the autouse fixture: `system` checks its rings itself."""


@pytest.fixture(scope="module")
def channels(system: WholeSystem) -> Iterator[Channels]:
    """Channels by calling role and called role."""
    with ExitStack() as stack:
        yield {
            (caller, place): stack.enter_context(
                system.access(caller).open_blocking_channel(system.address[place], place)
            )
            for caller, place in product(Role, PLACES)
        }


def test_a_role_may_call_what_the_table_says(channels: Channels, subtests: pytest.Subtests) -> None:
    for (method, at, who), caller in product(METHODS, Role):
        with subtests.test(method=method, caller=caller):
            names = set(re.split("[,;] ", who))
            for place in PLACES:
                channel = channels[caller, place]
                found = status(channel, method)
                if at != "all" and place not in at.split(", "):
                    assert found is CODE.UNIMPLEMENTED, place
                elif names & {"everybody", "every role", caller}:
                    assert found in HEARD, place
                elif "client" in names:
                    assert found is CODE.UNAUTHENTICATED, place
                    assert status(channel, method, **KEY_SHOWN) not in REFUSED, place
                else:
                    assert found is CODE.PERMISSION_DENIED, place


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    make_certificates(folder)
    return folder


def test_tls_refuses_a_certificate_of_another_authority(
    system: WholeSystem, foreign: Path, subtests: pytest.Subtests
) -> None:
    """The caller trusts the server, so the server refuses."""
    for role, place in product(Role, PLACES):
        with subtests.test(role=role, place=place):
            _, own, key = files_of(foreign, role)
            access = TlsAccess(str(system.certificates / "ca.pem"), own, key)
            with access.open_blocking_channel(system.address[place], place) as channel:
                assert status(channel, HEALTH_CHECK.lstrip("/")) is CODE.UNAVAILABLE


@pytest.mark.parametrize("place", PLACES)
def test_tls_refuses_a_client_without_a_certificate(system: WholeSystem, place: Role) -> None:
    authority = (system.certificates / "ca.pem").read_bytes()
    name = [("grpc.ssl_target_name_override", place.dns_name)]
    credentials = grpc.ssl_channel_credentials(authority)
    address = system.address[place]
    for channel in (
        grpc.secure_channel(address, credentials, options=name),
        grpc.insecure_channel(address),
    ):
        with channel:
            assert status(channel, "grpc.health.v1.Health/Check") is CODE.UNAVAILABLE


@pytest.mark.parametrize("place", PLACES)
def test_a_caller_refuses_a_server_of_another_role(
    system: WholeSystem, foreign: Path, place: Role
) -> None:
    """The caller also refuses a server whose certificate is from another authority."""
    address = system.address[place]
    requests = [(system.access(Role.GATEWAY), other) for other in Role if other is not place]
    for access, wanted in (*requests, (trusted(foreign, Role.GATEWAY), place)):
        with access.open_blocking_channel(address, wanted) as channel:
            assert status(channel, "grpc.health.v1.Health/Check") is CODE.UNAVAILABLE


def test_a_worker_can_join_only_in_the_role_of_its_certificate(
    system: WholeSystem, channels: Channels
) -> None:
    """Prefill cannot join with decode's hello, so a stolen key admits a single role."""
    hello = system.hello(Role.DECODE)
    hello.incarnation = bytes(16)
    report = fleet_pb2.WorkerReport(hello=hello)
    with pytest.raises(grpc.RpcError) as refused:
        list(FleetStub(channels[Role.PREFILL, Role.ROUTER]).Join(iter([report]), timeout=20))
    assert refused.value.code() is CODE.PERMISSION_DENIED  # type: ignore[attr-defined]
    assert len(system.fleet().workers) == 2
