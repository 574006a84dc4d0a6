"""Clients behind a load balancer of two gateways, as in a user's deployment, and their load."""

import asyncio
import itertools
import json
import ssl
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from system import HTTP_PORT, LOOK_S, WAIT_S
from systems.eventually import eventually

from pdserve.services.host.auth.roles import Role

sys.path.append(str(Path(__file__).parents[1] / "handoff"))

from steady_load import TIMEOUT_S, WORDS, Ask, Load

CLIENTS = 4
MODEL = "SmolLM2-135M-Instruct"
ASKS = (
    Ask(f"Story: {WORDS * 60}And then", 24),  # about 800 tokens, for prefill
    Ask("Number one comes after", 16),
    Ask("A stream goes on and on:", 160),
    Ask(f"Another story: {WORDS * 60}And then", 24),
    Ask("Number two comes after", 16),
)
NAME = {"sni_hostname": Role.GATEWAY.dns_name}  # must be in the HTTP certificate


class Balancer:
    """Send each request once, over a separate connection, to a ready gateway."""

    def __init__(self, hosts: Sequence[str], authority: Path | None = None) -> None:
        """`authority` has signed the gateways' certificates; without one they are contacted in
        plain text."""
        scheme = "http" if authority is None else "https"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # unused without TLS
        if authority is not None:
            context.load_verify_locations(authority)
        self._urls = [f"{scheme}://{host}:{HTTP_PORT}" for host in hosts]
        self._client = httpx.AsyncClient(
            verify=context, timeout=TIMEOUT_S, limits=httpx.Limits(max_keepalive_connections=0)
        )
        self._ready: list[str] = []
        self._turns = itertools.count()
        self.serials: set[str] = set()  # of the certificates seen

    async def __aenter__(self) -> "Balancer":
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._client.aclose()

    async def all_ready(self) -> None:
        """Wait until every gateway accepts requests."""
        await eventually(lambda: self._ready == self._urls, "gateways", WAIT_S)

    async def _watch(self) -> None:
        while True:
            self._ready = [url for url in self._urls if await self._is_ready(url)]
            await asyncio.sleep(LOOK_S)

    async def _is_ready(self, url: str) -> bool:
        with suppress(httpx.HTTPError):
            return (await self._client.get(f"{url}/ready", extensions=NAME)).is_success
        return False

    async def remote_prefills(self) -> int:
        """Remote prefills of all routers since their start, as the first gateway reports them."""
        reply = await self._client.get(f"{self._urls[0]}/metrics", extensions=NAME)
        rows = reply.raise_for_status().text.splitlines()
        name = 'pdserve_prefill_requests_total{where="remote"}'
        return sum(int(float(row.split()[-1])) for row in rows if row.startswith(name))

    async def chunks(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of one answer. Raises RuntimeError if it is refused."""
        if not self._ready:
            raise RuntimeError("no gateway is ready")
        url = self._ready[next(self._turns) % len(self._ready)] + "/v1/completions"
        async with self._client.stream("POST", url, json=body, extensions=NAME) as reply:
            self._note_certificate(reply)
            if reply.status_code != 200:
                raise RuntimeError(f"{reply.status_code}: {(await reply.aread()).decode()}")
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def _note_certificate(self, reply: httpx.Response) -> None:
        tls = reply.extensions["network_stream"].get_extra_info("ssl_object")
        if tls is not None:
            self.serials.add(tls.getpeercert()["serialNumber"])


class SteadyClients:
    """CLIENTS clients that send requests without a pause, from `async with` to its end."""

    def __init__(self, balancer: Balancer) -> None:
        self.load = Load(balancer.chunks, MODEL)

    async def __aenter__(self) -> "SteadyClients":
        await self.load.learn(ASKS)
        self._asking = asyncio.create_task(self.load.run(CLIENTS))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.load.stop()
        await self._asking

    @property
    def ended(self) -> int:
        """The number of ended requests, successful or not."""
        return self.load.completed + len(self.load.failed) + len(self.load.broken)

    async def ask_on(self) -> None:
        """Wait until a request that was sent after this call has ended."""
        enough = self.ended + CLIENTS + 1
        await eventually(lambda: self.ended >= enough, "answers", WAIT_S)

    @property
    def whole(self) -> bool:
        return not (self.load.failed or self.load.broken or self.load.unequal)

    @property
    def figures(self) -> dict[str, Any]:
        names = ("completed", "failed", "broken", "unequal")
        return {name: getattr(self.load, name) for name in names}
