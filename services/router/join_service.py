"""Fleet.Join: a worker's stream is its lease. Reports go to the core; some heartbeats are
echoed."""

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from pdserve.engine.kv.codec import decode_spec
from pdserve.protos import common_pb2, fleet_pb2
from pdserve.protos.fleet_pb2_grpc import FleetServicer
from pdserve.services.host.auth.access import Access
from pdserve.services.host.auth.roles import Role
from pdserve.services.host.errors import ServiceError, abort
from pdserve.services.host.rpc.protocol_version import PROTOCOL_VERSION, VersionGate
from pdserve.services.router.core import RouterCore

BOOT_BYTES = 16
HEARTBEAT_ECHO_S = 2.0  # between two echoes; a worker joins again after 5 s without one
ROLES = {fleet_pb2.PREFILL: Role.PREFILL, fleet_pb2.DECODE: Role.DECODE}


def check_hello(hello: fleet_pb2.WorkerHello) -> None:
    """Raise ServiceError(INVALID_ARGUMENT) if the router cannot use the worker."""
    invalid_field = ""
    if hello.role not in ROLES:
        invalid_field = "role"
    elif len(hello.boot) != BOOT_BYTES:
        invalid_field = "boot"
    elif not hello.address.rpartition(":")[2].isdigit():
        invalid_field = "address"
    elif not hello.card.name or not _has_layout(hello.card):
        invalid_field = "card"
    if invalid_field:
        raise ServiceError(
            common_pb2.INVALID_ARGUMENT, f"hello: {invalid_field} is invalid", invalid_field
        )


def _has_layout(card: common_pb2.ModelCard) -> bool:
    """Return whether the card's KV layout can be read."""
    try:
        decode_spec(card.kv_spec)
    except ValueError:
        return False
    return True


class JoinService(FleetServicer):
    """The router's side of Fleet.Join; the worker's side is services/worker/membership.py."""

    def __init__(self, core: RouterCore, access: Access) -> None:
        self._core = core
        self._access = access
        self._versions = VersionGate("router")

    async def Join(
        self,
        request_iterator: AsyncIterator[fleet_pb2.WorkerReport],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[fleet_pb2.JoinReply]:
        hello = (await anext(request_iterator, fleet_pb2.WorkerReport())).hello
        try:
            self._versions.check(hello.protocol, f"worker {hello.address}")
            check_hello(hello)
            if not self._access.may_be(context, ROLES[hello.role]):
                text = "hello: the certificate belongs to another role"
                raise ServiceError(common_pb2.PERMISSION_DENIED, text, "role")
        except ServiceError as error:
            await abort(context, error)
        worker = self._core.join(hello)
        lease = worker.lease
        try:
            welcome = fleet_pb2.Welcome(router_boot=self._core.boot, protocol=PROTOCOL_VERSION)
            yield fleet_pb2.JoinReply(welcome=welcome)
            last_echo = 0.0
            async for report in request_iterator:
                if not self._core.report(worker, report, lease):
                    return
                now = time.monotonic()
                has_heartbeat = report.HasField("heartbeat") or report.HasField("load_beat")
                if has_heartbeat and now - last_echo >= HEARTBEAT_ECHO_S:
                    last_echo = now
                    yield fleet_pb2.JoinReply(echo=fleet_pb2.HeartbeatEcho())
        finally:
            self._core.left(worker, lease)
