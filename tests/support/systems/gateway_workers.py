"""`pdserve gateway --workers 2` as a process, and a client of each of the two."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from systems.cluster_secret import SECRET
from systems.eventually import LIMIT_S, eventually

COMMAND = (sys.executable, "-P", "-m", "pdserve.cli.main", "gateway", "--workers", "2")


class GatewayWorkers:
    """`async with` starts it and waits until both processes are ready; it has ended afterwards.
    Its log is a file of the folder.
    """

    def __init__(self, router: str, folder: Path, *words: str) -> None:
        self._router = router
        self._log = folder / "gateway.log"
        self._words = words

    async def __aenter__(self) -> "GatewayWorkers":
        await self.start()
        await eventually(lambda: self.num_ready == 2, self.log)
        found = re.search(r"listens at (https?://127.0.0.1:(\d+)), gRPC at (\S+)", self.log())
        assert found
        self.url, self.port, self.grpc = found[1], int(found[2]), found[3]
        return self

    async def start(self) -> None:
        with self._log.open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                *COMMAND, "--port", "0", "--routers", self._router, *self._words,
                env=os.environ | {"PDSERVE_CLUSTER_SECRET": SECRET},
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    async def __aexit__(self, *exc: object) -> None:
        if self.process.returncode is None:
            self.process.kill()  # and its processes end with it
            await self.ended()

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await self.ended()

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), LIMIT_S)

    def log(self) -> str:
        return self._log.read_text()

    @property
    def num_ready(self) -> int:
        """Return how often a process was ready."""
        return len(re.findall(r"gateway \d is ready", self.log()))

    def workers(self) -> dict[str, psutil.Process]:
        """Return the processes by their names."""
        children = psutil.Process(self.process.pid).children()
        return {name: one for one in children if (name := one.name()).startswith("gateway ")}

    def listens(self) -> bool:
        """Return whether the parent listens."""
        sockets = psutil.Process(self.process.pid).net_connections("tcp")
        return any(one.status == psutil.CONN_LISTEN for one in sockets)

    def connections(self) -> dict[str, set[int]]:
        """Return the clients' ports that each process serves."""
        return {
            name: {
                conn.raddr.port
                for conn in one.net_connections("tcp4")
                if conn.status == "ESTABLISHED" and conn.laddr.port == self.port
            }
            for name, one in self.workers().items()
        }

    @asynccontextmanager
    async def both(self, key: str = "", **options: Any) -> AsyncIterator[list[httpx.AsyncClient]]:
        """Return a client of gateway 0 and one of gateway 1, which keep their connections."""
        found: dict[str, httpx.AsyncClient] = {}
        async with AsyncExitStack() as held:
            while len(found) < 2:
                client = await held.enter_async_context(self.client(key, **options))
                response = await client.get("/health")
                port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
                names = [name for name, ports in self.connections().items() if port in ports]
                found |= dict.fromkeys(names, client)
            yield [found["gateway 0"], found["gateway 1"]]

    def client(self, key: str = "", **options: Any) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=LIMIT_S, **options)
