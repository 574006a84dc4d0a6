"""A system of single processes on one machine, each at a separate address, so that a restarted one
gets its port again."""

import asyncio
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass, field

import grpc
from roles import start
from systems.eventually import eventually

from pdserve.protos.router_pb2 import GetFleetRequest
from pdserve.protos.router_pb2_grpc import RouterStub
from pdserve.services.host.auth.access import Access
from pdserve.services.host.auth.roles import Role

NETWORK = "127.0.77.0/24"
HTTP_PORT, RPC_PORT = 8443, 50050
WAIT_S, LOOK_S = 90.0, 0.2


def place(*counts: tuple[Role, int]) -> dict[str, tuple[Role, str]]:
    """The role and the address of this many processes of each role, by name."""
    named = [(f"{role} {n + 1}", role) for role, count in counts for n in range(count)]
    return {name: (role, f"127.0.77.{n}") for n, (name, role) in enumerate(named, 1)}


@dataclass
class System:
    """A system that starts and stops its processes by their names."""

    stack: ExitStack
    places: dict[str, tuple[Role, str]]
    options: dict[Role, list[str]]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def hosts(self, *roles: Role) -> list[str]:
        return [host for role, host in self.places.values() if role in roles]

    def start(self, name: str, *words: str, **env: str) -> None:
        role, host = self.places[name]
        if role is Role.GATEWAY:
            own = ["--host", host, "--port", f"{HTTP_PORT}"]
        else:
            own = ["--bind", f"{host}:{RPC_PORT}"]
        if role is not Role.ROUTER:
            own += [f"--routers={router}:{RPC_PORT}" for router in self.hosts(Role.ROUTER)]
        given = [*own, *self.options.get(role, []), *words]
        self.running[name] = start(self.stack, role, *given, env=env)

    async def stop(self, name: str) -> int:
        """Stop a process in an orderly way; returns its exit code."""
        self.running[name].terminate()
        return await asyncio.to_thread(self.running[name].wait)

    async def joined(self, access: Access) -> None:
        """Wait until each router can place on each worker."""
        workers = {f"{host}:{RPC_PORT}" for host in self.hosts(Role.PREFILL, Role.DECODE)}

        async def all_there() -> bool:
            await asyncio.sleep(LOOK_S)
            found = [
                await asyncio.to_thread(live_workers, access, router)
                for router in self.hosts(Role.ROUTER)
            ]
            return all(there == workers for there in found)

        await eventually(all_there, "workers", WAIT_S)


def live_workers(access: Access, router: str) -> set[str]:
    """Addresses of the workers that a router can place on."""
    with access.open_blocking_channel(f"{router}:{RPC_PORT}", Role.ROUTER) as channel:
        asked = GetFleetRequest()
        try:
            view = RouterStub(channel).GetFleet(asked, metadata=access.metadata, timeout=5)
        except grpc.RpcError:
            return set()
    return {worker.hello.address for worker in view.workers if worker.state == "live"}
