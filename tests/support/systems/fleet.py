"""A whole system for tests: `pdserve up` as a child process, its clients and its figures."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil

from systems.cluster_secret import BEARER, SECRET, open_channel
from systems.eventually import wait_until

READY = re.compile(
    r"pdserve is ready after ([\d.]+) s at (\S+)\n[\s\S]*?gRPC +text at (\S+), token ids at (\S+)\n"
)


class Fleet:
    """Started by `with Fleet("--prefill", "1", ...) as fleet`; stopped by SIGTERM at the end.

    `certificates`: its processes authenticate by their own certificates, as without any option;
    otherwise by the secret of the tests, which then gives them access to its router. `drain_s`: by
    default stopping does not wait, since the tests' requests are over.
    """

    def __init__(
        self,
        *options: str,
        timeout_s: float = 90.0,
        env: dict[str, str] | None = None,
        certificates: bool = False,
        drain_s: float = 0.2,
    ) -> None:
        trust = () if certificates else ("--cluster-secret", SECRET)
        self.options = (*trust, "--drain-s", str(drain_s), *options)
        self.timeout_s = timeout_s
        self.env = env or {}

    def __enter__(self) -> "Fleet":
        self._folder = tempfile.TemporaryDirectory()
        self.log_path = Path(self._folder.name) / "up.log"
        self._log = self.log_path.open("wb")
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pdserve.cli.main", "up", "--port", "0",
             "--grpc-port", "0", *self.options],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **self.env},
        )  # fmt: skip
        try:
            wait_until(self._is_ready, "pdserve up", self.timeout_s)
        except BaseException:
            print(self.log(), file=sys.stderr)
            self.__exit__()
            raise
        return self

    def _is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"pdserve up ended with {self.process.returncode}:\n{self.log()}")
        found = READY.search(self.log())
        if found:
            self.ready_s = float(found[1])
            self.url, self.grpc, self.router = found[2], found[3], found[4]
        return bool(found)

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()
        self.exit_code = self.process.returncode
        self.final_log = self.log()
        self._folder.cleanup()

    def log(self) -> str:
        """Return everything that the system has printed so far."""
        return self.log_path.read_text(errors="replace")

    def pids(self, role: str) -> list[int]:
        """Return live processes of a role: gateway, router, prefill or decode."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        found = []
        for child in children:
            with suppress(psutil.NoSuchProcess):  # it has ended since
                if child.name().startswith(role):
                    found.append(child.pid)
        return found

    def metrics(self) -> dict[str, float]:
        """Return /metrics of the gateway, by name with labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).raise_for_status().text
        rows = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in rows}

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over its label sets that carry `labels`."""
        wanted = [f'{k}="{v}"' for k, v in labels.items()]
        return sum(
            value
            for key, value in self.metrics().items()
            if key.split("{")[0] == name and all(w in key for w in wanted)
        )

    def prefills(self, where: str) -> int:
        """Return the requests prefilled "local" or "remote" so far."""
        return int(self.metric("pdserve_prefill_requests_total", where=where))

    def blocks(self) -> dict[str, dict[str, float]]:
        """Return KV blocks by worker and state."""
        found: dict[str, dict[str, float]] = {}
        for key, value in self.metrics().items():
            if key.startswith("pdserve_kv_blocks{"):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', key))
                found.setdefault(labels["worker"], {})[labels["state"]] = value
        return found

    def fleet_view(self) -> Any:
        """Return the router's FleetView."""
        from pdserve.protos import router_pb2, router_pb2_grpc

        with grpc.insecure_channel(self.router) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            return stub.GetFleet(router_pb2.GetFleetRequest(), metadata=BEARER)

    def all_blocks_back(self) -> bool:
        """Check that free + cached == total on every worker: nothing used, nothing reserved."""
        blocks = self.blocks()
        return bool(blocks) and all(b["free"] + b["cached"] == b["total"] for b in blocks.values())

    def generate(self, request: Sequence[Any], width: int = 8) -> dict[str, tuple[int, ...]]:
        """Run engine Requests through the router's Generate, `width` at a time."""
        return asyncio.run(self._generate(request, width))

    async def _generate(self, body: Sequence[Any], width: int) -> dict[str, tuple[int, ...]]:
        from pdserve.protos import common_pb2, router_pb2, router_pb2_grpc

        gate = asyncio.Semaphore(width)
        tokens: dict[str, tuple[int, ...]] = {}

        async def one(stub: Any, request: Any) -> None:
            p = request.params
            message = router_pb2.GenerateRequest(
                prompt_ids=request.prompt_ids,
                seed=request.seed,
                timeout_ms=600_000,
                params=common_pb2.SamplingParams(
                    temperature=p.temperature, max_tokens=p.max_tokens, ignore_eos=p.ignore_eos
                ),
            )
            ids: list[int] = []
            async with gate:
                async for event in stub.Generate(message):
                    if event.WhichOneof("event") == "tokens":
                        assert event.tokens.position == len(ids)
                        ids.extend(event.tokens.ids)
            tokens[request.key] = tuple(ids)

        async with open_channel(self.router) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            await asyncio.gather(*(one(stub, request) for request in body))
        return tokens
