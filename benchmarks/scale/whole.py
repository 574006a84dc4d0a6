"""A small system in which everything except the engines is real: routers, gateways, streams over
HTTP.

No token of any stream may be lost, repeated or out of order: the fakes send at each position the
token of that position, and the clients read its text.
"""

import asyncio
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import uvloop
from front.clients import Stream, stream
from scale.processes import GIVES_WAY, Processes, cpu_s, free_address, read_line
from scale.shape import MARKS, MODEL, Shape
from systems.eventually import wait_until
from systems.single_processes import PDSERVE

from pdserve.cli.async_client import AsyncApi
from pdserve.cli.options import ClientSettings
from pdserve.services.common.auth.certificates import Role

START_S = 90.0


@dataclass(frozen=True)
class Whole:
    """Sizes of the system."""

    routers: int = 2
    gateways: int = 2
    workers: int = 20
    streams: int = 300
    num_tokens: int = 100
    nice: int = GIVES_WAY  # of the fakes

    @property
    def shape(self) -> Shape:
        """The system as seen by one of the routers."""
        return Shape(
            workers=self.workers,
            streams=self.streams // self.routers,
            gateways=self.gateways,
            routers=self.routers,
            answer_len=self.num_tokens,
            hashes=2_000,
        )


def measure(whole: Whole) -> dict[str, Any]:
    """Run all streams at once, and count their tokens."""
    with TemporaryDirectory() as folder, Processes(Path(folder), whole.nice) as processes:
        routers = [free_address() for _ in range(whole.routers)]
        named = {
            f"router {n}": processes.start(
                *PDSERVE, "router", "--bind", address, *processes.words(Role.ROUTER)
            )
            for n, address in enumerate(routers, 1)
        }
        for address in routers:
            wait_until(lambda a=address: processes.fleet(a), "a router", START_S, 0.1)
        admitted = str(processes.folder / "admitted.json")
        named["workers"] = processes.fake(
            "fake_workers.py", whole.shape.to_json(), admitted, *routers
        )
        if not read_line(named["workers"], START_S):
            raise RuntimeError("the workers do not start")
        for address in routers:
            processes.wait_joined(address, whole.workers)
        gateways = [free_address() for _ in range(whole.gateways)]
        for number, address in enumerate(gateways, 1):
            named[f"gateway {number}"] = _gateway(processes, address, routers)
        wait_until(lambda: all(map(_ready, gateways)), "the gateways", START_S, 0.2)
        return _run(whole, gateways, named)


def _gateway(processes: Processes, address: str, routers: list[str]) -> subprocess.Popen[bytes]:
    words = ["--port", address.split(":")[1], *processes.words(Role.GATEWAY)]
    words += [f"--routers={router}" for router in routers]
    return processes.start(*PDSERVE, "gateway", *words)


def _ready(gateway: str) -> bool:
    try:
        answer = httpx.get(f"http://{gateway}/v1/models", timeout=5)
        return answer.status_code == 200 and MODEL in answer.text
    except httpx.TransportError:
        return False


def _run(
    whole: Whole, gateways: list[str], named: dict[str, subprocess.Popen[bytes]]
) -> dict[str, Any]:
    before = {name: cpu_s(process.pid) for name, process in named.items()}
    began = time.monotonic()
    answers = uvloop.run(_streams(whole, gateways))
    seconds = time.monotonic() - began
    whole_answers = [a for a in answers if isinstance(a, Stream)]
    wanted = [p % MARKS for p in range(whole.num_tokens)]
    exact = sum(answer.marks == wanted for answer in whole_answers)
    return {
        "ok": exact == whole.streams,
        "streams": whole.streams,
        "exact": exact,
        "tokens": sum(len(answer.marks) for answer in whole_answers),
        "tokens_demanded": whole.streams * whole.num_tokens,
        "errors": sorted({str(a)[:200] for a in answers if not isinstance(a, Stream)})[:3],
        "seconds": round(seconds, 1),
        "cores": {
            name: round((cpu_s(process.pid) - before[name]) / seconds, 3)
            for name, process in named.items()
        },
    }


async def _streams(whole: Whole, gateways: list[str]) -> list[Stream | BaseException]:
    apis = [AsyncApi(ClientSettings(url=f"http://{gateway}")) for gateway in gateways]
    answers = await asyncio.gather(
        *(
            stream(apis[n % len(apis)], MODEL, f"{n} Go.", whole.num_tokens)
            for n in range(whole.streams)
        ),
        return_exceptions=True,
    )
    for api in apis:
        api.close()
    return answers
