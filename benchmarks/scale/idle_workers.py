"""What idle workers cost a router, by CPU time.

`python benchmarks/scale/idle_workers.py` starts a real router process. Workers without an engine,
in another process, join it with the real Membership over connections of their own and have a
session each. Prints the part of a core that the router used, without and with them.
"""

import argparse
import asyncio
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pdserve.engine.kv.codec import encode_spec
from pdserve.engine.kv.spec import KvSpec
from pdserve.protos import common_pb2 as pb
from pdserve.protos import fleet_pb2
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.router_pb2 import GetFleetRequest
from pdserve.protos.router_pb2_grpc import RouterStub
from pdserve.protos.worker_pb2_grpc import DecodeServicer, add_DecodeServicer_to_server
from pdserve.services.host.auth.roles import Role
from pdserve.services.host.auth.secret import SecretAccess
from pdserve.services.host.server import GrpcHost
from pdserve.services.worker.membership import Membership

START_S = 60.0
CARD = pb.ModelCard(
    name="m",
    kv_identity=pb.KvIdentity(digest=bytes(16)),
    kv_spec=encode_spec(KvSpec(16, ())),
)


class IdleWorker(DecodeServicer):
    """A decode worker that has nothing to do."""

    def __init__(self, router: str, access: SecretAccess) -> None:
        self.host = GrpcHost(access)
        add_DecodeServicer_to_server(self, self.host.server)
        self._router, self._access = router, access

    async def start(self) -> None:
        address = f"127.0.0.1:{self.host.listen('127.0.0.1:0')}"
        await self.host.start()
        hello = fleet_pb2.WorkerHello(
            role=fleet_pb2.DECODE, boot=os.urandom(16), address=address, card=CARD, wire_version=1
        )
        self.membership = Membership(hello, [self._router], self._access)
        self.membership.start()

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[wire.DecodeMessage]:
        async for _ in requests:
            pass
        yield wire.DecodeMessage()


def cpu_seconds(pid: int) -> float:
    """User and system time of the threads of a process so far. Not from its `stat`, which counts
    the ticks of a clock: it misjudges what runs often and shortly."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((t / "schedstat").read_text().split()[0]) for t in threads) / 1e9


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def until_seen(address: str, access: SecretAccess, num_workers: int) -> None:
    """Wait until the router says that so many workers are live."""
    async with asyncio.timeout(START_S), access.open_channel(address, Role.ROUTER) as channel:
        while True:
            view = await RouterStub(channel).GetFleet(GetFleetRequest(), wait_for_ready=True)
            if sum(worker.state == "live" for worker in view.workers) == num_workers:
                return
            await asyncio.sleep(0.2)


async def cost(pid: int, seconds: float) -> float:
    """Part of a core that a process uses for so long."""
    used, began = cpu_seconds(pid), time.monotonic()
    await asyncio.sleep(seconds)
    return (cpu_seconds(pid) - used) / (time.monotonic() - began)


async def measure(num_workers: int, seconds: float) -> dict[str, Any]:
    secret = secrets.token_hex(32)
    access = SecretAccess((secret,))
    address = f"127.0.0.1:{free_port()}"
    code = "from pdserve.services.cli.main import main; main()"
    router = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, "router", "--bind", address),
        env=os.environ | {"PDSERVE_CLUSTER_SECRET": secret},
        stderr=asyncio.subprocess.DEVNULL,
    )
    workers = [IdleWorker(address, access) for _ in range(num_workers)]
    try:
        await until_seen(address, access, 0)
        alone = await cost(router.pid, seconds / 4)
        await asyncio.gather(*(worker.start() for worker in workers))
        await until_seen(address, access, num_workers)
        await asyncio.sleep(2.0)  # sessions, and what the start has left
        beside = await cost(router.pid, seconds)
        await until_seen(address, access, num_workers)
    finally:
        router.terminate()
        await asyncio.wait_for(router.wait(), 30)
        closings = (asyncio.to_thread(worker.membership.close) for worker in workers)
        await asyncio.gather(*closings, return_exceptions=True)
        await asyncio.gather(*(worker.host.stop(0) for worker in workers))
    return {
        "workers": num_workers,
        "seconds": seconds,
        "core_alone": round(alone, 4),
        "core": round(beside, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    print(json.dumps(asyncio.run(measure(args.workers, args.seconds))))


if __name__ == "__main__":
    main()
