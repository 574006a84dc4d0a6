"""Line 8: streams survive a rolling change of the instruction set, and a change of the weights ends
them at once, with a typed error.

STREAMS run on two decode workers with AVX2 kernels; two with AVX-512 kernels are added, and the old
ones are stopped one after the other. Then workers with other weights are added, and those are
stopped.
"""

import asyncio
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
from builders.tiny_models import write_tiny
from roles import SECRET, start, trust
from systems.chaos.cluster import lasting_port
from systems.eventually import eventually

from pdserve.protos import router_pb2, router_pb2_grpc

STREAMS, TOKENS, AT_ONCE_S = 24, 1200, 5.0
MODEL = "SmolLM2-135M-Instruct"
REASON = "no worker is available with the weights that began this answer"


class System:
    """A gateway and a router; decode workers are added and removed."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.router, self._http = (f"127.0.0.1:{lasting_port()}" for _ in range(2))
        self.url = f"http://{self._http}"
        host, port = self._http.split(":")
        own = ("--routers", self.router)
        start(stack, "router", "--bind", self.router, *trust("router", None))
        web = ("--host", host, "--port", port)
        start(stack, "gateway", *web, *own, *trust("gateway", None))

    def decode(self, *words: str) -> Any:
        own = ("--bind", "127.0.0.1:0", "--routers", self.router, "--threads", "1")
        return start(self._stack, "decode", *own, *words, *trust("decode", None))

    def workers(self) -> int:
        """The number of workers that the router can place on."""
        with grpc.insecure_channel(self.router) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            bearer = (("authorization", f"Bearer {SECRET}"),)
            return len(stub.GetFleet(router_pb2.GetFleetRequest(), metadata=bearer).workers)

    async def serves(self, workers: int) -> None:
        await eventually(lambda: self._serves(workers), "workers", limit_s=90)

    def _serves(self, workers: int) -> bool:
        try:
            return self.workers() == workers and httpx.get(f"{self.url}/ready").is_success
        except (grpc.RpcError, httpx.HTTPError):
            return False


class Stream:
    """One request: its number of tokens, and how and when it ended."""

    def __init__(self) -> None:
        self.tokens, self.error, self.inexact, self.ended = 0, "", False, 0.0

    async def run(self, client: httpx.AsyncClient, number: int) -> None:
        body = {
            "model": MODEL, "prompt": f"Count from {number}:", "max_tokens": TOKENS,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line[6:]))
        self.ended = time.monotonic()

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = str(event["error"]["message"])
        elif event.get("usage"):
            self.inexact = bool(event["usage"]["pdserve"]["inexact"])
            self.tokens = event["usage"]["completion_tokens"]
        else:
            self.tokens += 1


async def roll(system: System, old: list[Any], new: tuple[str, ...]) -> tuple[list[Stream], float]:
    """Run streams on `old`, then add two workers with the options `new`, then stop `old`."""
    async with httpx.AsyncClient(base_url=system.url, timeout=120) as client:
        streams = [Stream() for _ in range(STREAMS)]
        tasks = [asyncio.create_task(s.run(client, n)) for n, s in enumerate(streams)]
        await eventually(lambda: all(s.tokens > 2 for s in streams), "streams", limit_s=60)
        fresh = [system.decode(*new) for _ in old]
        await system.serves(len(old) + len(fresh))
        assert not any(s.ended for s in streams), "they run when the first worker is stopped"
        for process in old:
            process.terminate()
            await asyncio.to_thread(process.wait)
        gone = time.monotonic()
        await asyncio.gather(*tasks)
    return streams, gone


async def measure(stack: ExitStack) -> dict[str, Any]:
    system = System(stack)
    old = [system.decode("--native-isa", "avx2") for _ in range(2)]
    await system.serves(2)
    streams, gone = await roll(system, old, ("--native-isa", "avx512"))
    whole = sum(s.tokens == TOKENS and not s.error for s in streams)
    outlived = [s for s in streams if s.ended > gone]
    return {
        "ok": whole == STREAMS and bool(outlived) and all(s.inexact for s in outlived),
        "streams": STREAMS,
        "whole": whole,
        "outlived_their_workers": len(outlived),
        "inexact": sum(s.inexact for s in streams),
    }


async def other_weights(stack: ExitStack) -> dict[str, Any]:
    system = System(stack)
    old = [system.decode() for _ in range(2)]
    await system.serves(2)
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    other = write_tiny(Path(folder) / "other", "llama", seed=1)
    streams, gone = await roll(system, old, ("--model", str(other), "--served-name", MODEL))
    typed = sum(REASON in s.error for s in streams)
    late = max(s.ended - gone for s in streams)
    return {
        "ok": typed == STREAMS and late < AT_ONCE_S,
        "streams": STREAMS,
        "ended_with_that_error": typed,
        "errors": sorted({s.error for s in streams}),
        "last_s": round(late, 2),
    }


def main() -> None:
    found = {}
    for name, part in (("instruction set", measure), ("weights", other_weights)):
        with ExitStack() as stack:
            found[name] = asyncio.run(part(stack))
    print(json.dumps({"ok": all(part["ok"] for part in found.values()), **found}))


if __name__ == "__main__":
    main()
