"""A cluster's authority, the certificate of HTTP and the cluster secret change under load, by the
steps of docs/security.md, and no request fails.

`authority`: one process of each role, without restarts. Open connections are not affected by files,
so after each step all connections between the processes are reset (`ss -K`) and must be reopened
with the current files. `secret`: two of each role except prefill, each restarted three times, in
turn.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from balancer import Balancer, SteadyClients
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from roles import access_of, files, make_certificates, trust
from system import NETWORK, RPC_PORT, System, place
from systems.eventually import eventually

from pdserve.protos.common_pb2 import BlobRequest
from pdserve.protos.common_pb2_grpc import BlobsStub
from pdserve.services.host.auth.certificates import Identity, issue, make_authority
from pdserve.services.host.auth.roles import Role
from pdserve.services.host.auth.secret import SecretAccess
from pdserve.services.host.auth.tls import TlsAccess

SESSIONS = 5  # of the gateway with the router, and two of the router with each worker
OLD, NEW = "the-old-secret-of-this-cluster-" + "o" * 9, "its-new-secret-" + "n" * 25
ROUNDS = ((OLD, NEW), (NEW, OLD), (NEW,))  # the first is sent, all are accepted
LAME_DUCK_S = 2  # longer than the balancer takes to notice that a gateway shuts down
WORKER = ["--kv-transport", "tcp", "--threads", "1"]


def put(target: Path, content: bytes) -> None:
    """Replace a file atomically, as `pdserve certs` does."""
    new = target.with_suffix(".new")
    new.write_bytes(content)
    new.replace(target)


def reset_connections() -> int:
    """Reset all gRPC connections between the processes; returns their number."""
    chosen = ["state", "established", "src", NETWORK, "sport", "=", f":{RPC_PORT}"]
    done = subprocess.run(["ss", "-KHtn", *chosen], check=True, capture_output=True, text=True)
    return len(done.stdout.splitlines())


@dataclass
class Caller:
    """A client that connects to the router and the workers, with certificates from a folder."""

    folder: Path
    trusted: str  # authorities

    def accepted(self, system: System) -> int:
        """The number of processes that accept it and present a certificate that it trusts."""
        return sum(
            self._answers(role, host)
            for role, host in system.places.values()
            if role is not Role.GATEWAY
        )

    def _answers(self, role: Role, host: str) -> bool:
        own = Role.GATEWAY if role is Role.ROUTER else Role.ROUTER
        _, certificate, key = files(own, self.folder)
        access = TlsAccess(self.trusted, certificate.read_text(), key.read_text())
        with access.open_blocking_channel(f"{host}:{RPC_PORT}", role) as channel:
            try:
                HealthStub(channel).Check(HealthCheckRequest(), timeout=10)
            except grpc.RpcError:
                return False
        return True


class AuthorityChange:
    """The steps of a change, each under load, and who is accepted after it."""

    def __init__(self, folder: Path, system: System) -> None:
        self.rows: list[dict[str, Any]] = []
        self._live, self._system = folder / "live", system
        old, self._new = folder / "old", folder / "new"
        self._old_ca, self._new_ca = ((one / "ca.pem").read_text() for one in (old, self._new))
        self._of_old = Caller(old, self._old_ca + self._new_ca)
        self._of_new = Caller(self._new, self._new_ca)

    async def run(self, clients: SteadyClients) -> None:
        trusted = self._live / "ca.pem"
        await self._step(clients, "before", lambda: None)
        both = (self._old_ca + self._new_ca).encode()
        await self._step(clients, "both authorities", partial(put, trusted, both))
        for role in Role:
            await self._step(clients, f"certificate of {role}", partial(self._renew, role))
        await self._step(clients, "new alone", partial(put, trusted, self._new_ca.encode()))

    async def _step(self, clients: SteadyClients, what: str, change: Callable[[], None]) -> None:
        await eventually(lambda: clients.load.running, "streams under way")
        clients.load.where, began, streams = what, time.monotonic(), clients.load.running
        change()
        reset = reset_connections()
        await clients.ask_on()
        row = {
            "step": what,
            "streams": streams,
            "reset_connections": reset,
            "let_an_old_certificate_in": await asyncio.to_thread(
                self._of_old.accepted, self._system
            ),
            "show_and_take_new_ones": await asyncio.to_thread(self._of_new.accepted, self._system),
            "s": round(time.monotonic() - began, 1),
        }
        self.rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)

    def _renew(self, role: Role) -> None:
        _, certificate, key = files(role, self._new)
        put(self._live / key.name, key.read_bytes())
        put(self._live / certificate.name, certificate.read_bytes())

    @property
    def right(self) -> bool:
        """Whether each step changed the accepted certificates as expected, with all connections
        reopened at each."""
        seen = [(r["let_an_old_certificate_in"], r["show_and_take_new_ones"]) for r in self.rows]
        expected = [(3, 0), (3, 0), (3, 0), (3, 1), (3, 2), (3, 3), (0, 3)]
        return seen == expected and all(row["reset_connections"] >= SESSIONS for row in self.rows)


def show_on_the_web(folder: Path, own: Identity) -> None:
    put(folder / "web-key.pem", own.key)
    put(folder / "web.pem", own.certificate)


async def _authority(folder: Path, stack: ExitStack) -> dict[str, Any]:
    for name in ("old", "new"):
        make_certificates(folder / name)
    (folder / "live").mkdir()
    for file in (folder / "old").iterdir():
        put(folder / "live" / file.name, file.read_bytes())
    web = make_authority()
    put(folder / "web-ca.pem", web.certificate)
    show_on_the_web(folder, issue(web, Role.GATEWAY))
    shown = ["--tls-cert", f"{folder}/web.pem", "--tls-key", f"{folder}/web-key.pem"]
    worker = [*WORKER, "--encrypt-kv"]
    options = {Role.GATEWAY: shown, Role.PREFILL: worker, Role.DECODE: worker}
    system = System(stack, place(*((role, 1) for role in Role)), options)
    for name, (role, _) in system.places.items():
        system.start(name, *trust(role, folder / "live"))
    async with Balancer(system.hosts(Role.GATEWAY), folder / "web-ca.pem") as balancer:
        await system.joined(access_of(Role.GATEWAY, folder / "live"))
        await balancer.all_ready()
        change = AuthorityChange(folder, system)
        async with SteadyClients(balancer) as clients:
            show_on_the_web(folder, issue(web, Role.GATEWAY))
            await change.run(clients)
            before = await balancer.remote_prefills()
            await clients.ask_on()
            remote = await balancer.remote_prefills() - before
    codes = [await system.stop(name) for name in system.places]
    return {
        "ok": clients.whole
        and change.right
        and remote > 0
        and len(balancer.serials) == 2
        and not any(codes),
        **clients.figures,
        "steps": change.rows,
        "certificates_of_http_seen": len(balancer.serials),
        "remote_prefills_at_the_end": remote,
        "exit_codes": codes,
    }


def refused(system: System, secret: str) -> int:
    """The number of routers and workers that refuse it."""
    count = 0
    for host in system.hosts(Role.ROUTER, Role.PREFILL, Role.DECODE):
        with grpc.insecure_channel(f"{host}:{RPC_PORT}") as channel:
            stub, asked = BlobsStub(channel), BlobRequest()
            call = stub.GetBlob(asked, metadata=SecretAccess((secret,)).metadata, timeout=10)
            count += call.code() is grpc.StatusCode.UNAUTHENTICATED
    return count


async def _secret(stack: ExitStack) -> dict[str, Any]:
    counts = ((Role.GATEWAY, 2), (Role.ROUTER, 2), (Role.PREFILL, 1), (Role.DECODE, 2))
    gateway = ["--lame-duck-s", f"{LAME_DUCK_S}"]
    options = {Role.GATEWAY: gateway, Role.PREFILL: WORKER, Role.DECODE: WORKER}
    system = System(stack, place(*counts), options)

    def begin(name: str, secrets: tuple[str, ...]) -> None:
        system.start(name, PDSERVE_CLUSTER_SECRET=",".join(secrets), PDSERVE_DRAIN_S="30")

    for name in system.places:
        begin(name, (OLD,))
    restarts: list[dict[str, Any]] = []
    async with Balancer(system.hosts(Role.GATEWAY)) as balancer:
        await system.joined(SecretAccess((OLD,)))
        await balancer.all_ready()
        async with SteadyClients(balancer) as clients:
            for secrets in ROUNDS:
                accepted_by_all = SecretAccess((OLD if OLD in secrets else NEW,))
                for name in system.places:
                    await eventually(lambda: clients.load.running, "streams under way")
                    clients.load.where, began = name, time.monotonic()
                    before, streams = clients.load.completed, clients.load.running
                    code = await system.stop(name)
                    stopped_s = time.monotonic() - began
                    begin(name, secrets)
                    await system.joined(accepted_by_all)
                    await balancer.all_ready()
                    row = {
                        "process": name,
                        "accepts": [("old", "new")[secret == NEW] for secret in secrets],
                        "streams": streams,
                        "exit_code": code,
                        "stopped_s": round(stopped_s, 1),
                        "back_s": round(time.monotonic() - began, 1),
                        "completed_meanwhile": clients.load.completed - before,
                    }
                    restarts.append(row)
                    print(json.dumps(row), file=sys.stderr, flush=True)
            remote = await balancer.remote_prefills()
    servers = len(system.hosts(Role.ROUTER, Role.PREFILL, Role.DECODE))
    old, new = refused(system, OLD), refused(system, NEW)
    codes = [row["exit_code"] for row in restarts]
    return {
        "ok": clients.whole and (old, new) == (servers, 0) and remote > 0 and not any(codes),
        **clients.figures,
        "restarts": restarts,
        "remote_prefills_since": remote,
        "servers": servers,
        "refuse_the_old_secret": old,
        "refuse_the_new_secret": new,
    }


def authority() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        return asyncio.run(_authority(Path(folder), stack))


def secret() -> dict[str, Any]:
    with ExitStack() as stack:
        return asyncio.run(_secret(stack))
