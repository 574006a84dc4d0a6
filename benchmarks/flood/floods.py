"""Floods of the routes of REST and gRPC, each in a separate process: it shares no event loop with
the measured clients.

`python floods.py NAME URL TEXT IDS` prints "begun", sends requests on CONNECTIONS connections, each
again as soon as it has its answer, until standard input ends, and prints the number of answers by
status. TEXT and IDS are host:port of the gateway's gRPC and of the router's.
"""

import asyncio
import itertools
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from pdserve.cli.async_client import AsyncApi
from pdserve.cli.http_client import ApiError
from pdserve.cli.options import ClientSettings
from pdserve.protos import common_pb2, router_pb2, router_pb2_grpc, text_pb2, text_pb2_grpc

CONNECTIONS = 24
LOST = "0"  # the status of a request without a response
KEY, MODEL = "flood", "SmolLM2-135M-Instruct"
LONG = "one two three four five six seven eight nine ten eleven twelve " * 400
BEARER = (("authorization", f"Bearer {KEY}"),)
# A flooded server has a separate connection for each of the flood's channels.
APART = (("grpc.use_local_subchannel_pool", 1),)
Ask = Callable[[int], Awaitable[str]]  # request number -> status


@dataclass(frozen=True)
class Places:
    """Addresses of a system, host:port each."""

    http: str
    text: str
    ids: str


@dataclass(frozen=True)
class Http:
    """A REST route. "{number}" in the body's prompt is replaced by a different one each time."""

    method: str
    path: str
    body: Any = None

    async def open(self, stack: AsyncExitStack, places: Places) -> Ask:
        api = AsyncApi(ClientSettings(url=f"http://{places.http}", api_key=(KEY,)))
        stack.callback(api.close)
        prepared = json.dumps(self.body).encode()
        is_numbered = "{number}" in str((self.body or {}).get("prompt"))

        async def ask(number: int) -> str:
            data = prepared
            if is_numbered:
                body = self.body | {"prompt": self.body["prompt"].format(number=number)}
                data = json.dumps(body).encode()
            call = api.get(self.path) if self.method == "GET" else api.post(self.path, data)
            try:
                return str((await call).status)
            except ApiError:
                return LOST

        return ask


@dataclass(frozen=True)
class Rpc:
    """A gRPC method."""

    call: Callable[[grpc.aio.Channel], Callable[..., Any]]
    message: Any
    at_router: bool = False

    async def open(self, stack: AsyncExitStack, places: Places) -> Ask:
        address = places.ids if self.at_router else places.text
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=APART))
        call = self.call(channel)

        async def ask(number: int) -> str:
            request = call(self.message, metadata=BEARER)
            try:
                if isinstance(request, grpc.aio.UnaryStreamCall):
                    async for _ in request:
                        pass
                else:
                    await request
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return "OK"

        return ask


def _options(tokens: int) -> text_pb2.TextOptions:
    params = common_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True)
    return text_pb2.TextOptions(params=params)


def _text(name: str) -> Callable[[grpc.aio.Channel], Callable[..., Any]]:
    return lambda channel: getattr(text_pb2_grpc.TextStub(channel), name)


def _ids(name: str) -> Callable[[grpc.aio.Channel], Callable[..., Any]]:
    return lambda channel: getattr(router_pb2_grpc.RouterStub(channel), name)


_completion = partial(Http, "POST", "/v1/completions")
_chat = partial(Http, "POST", "/v1/chat/completions")
FLOODS: dict[str, Http | Rpc] = {
    "completions": _completion(
        {"model": MODEL, "prompt": "flood", "max_tokens": 64, "ignore_eos": True}
    ),
    "long prompts": _completion(
        {"model": MODEL, "prompt": "{number} " + LONG[:6000], "max_tokens": 1}
    ),
    "one long prompt": _completion({"model": MODEL, "prompt": LONG[:6000], "max_tokens": 1}),
    "chat": _chat(
        {"model": MODEL, "messages": [{"role": "user", "content": "flood"}], "max_tokens": 64},
    ),
    "refused bodies": _chat({"model": MODEL, "messages": LONG}),
    "tokenize": Http(
        "POST", "/tokenize", {"model": MODEL, "prompt": LONG[:20_000]}
    ),
    "detokenize": Http(
        "POST",
        "/detokenize",
        {"model": MODEL, "tokens": list(range(100, 8000))},
    ),
    "models": Http("GET", "/v1/models"),
    "model": Http("GET", f"/v1/models/{MODEL}"),
    "metrics": Http("GET", "/metrics"),
    "health": Http("GET", "/health"),
    "ready": Http("GET", "/ready"),
    "Text/Complete": Rpc(
        _text("Complete"), text_pb2.CompleteRequest(prompt="flood", options=_options(64)),
    ),
    "Text/Chat": Rpc(
        _text("Chat"),
        text_pb2.ChatRequest(
            messages=[text_pb2.ChatMessage(role="user", content="flood")], options=_options(64)
        ),
    ),
    "Router/Generate": Rpc(
        _ids("Generate"),
        router_pb2.GenerateRequest(
            prompt_ids=[100, 200, 300],
            params=common_pb2.SamplingParams(max_tokens=64, ignore_eos=True),
        ),
        at_router=True,
    ),
    "Router/ListModels": Rpc(
        _ids("ListModels"), router_pb2.ListModelsRequest(), at_router=True
    ),
}  # fmt: skip


async def flood(name: str, places: Places) -> Counter[str]:
    """The statuses of the answers until standard input ended."""
    statuses: Counter[str] = Counter()
    numbers = itertools.count()

    async def one(ask: Ask) -> None:
        while True:
            statuses[await ask(next(numbers))] += 1

    async with AsyncExitStack() as stack:
        asks = [await FLOODS[name].open(stack, places) for _ in range(CONNECTIONS)]
        tasks = [asyncio.create_task(one(ask)) for ask in asks]
        print("begun", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return statuses


if __name__ == "__main__":
    print(json.dumps(asyncio.run(flood(sys.argv[1], Places(*sys.argv[2:])))))
