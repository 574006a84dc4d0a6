"""A process with the sessions of all gateways to one router, which keeps its streams open:
`fake_gateways.py CERTIFICATES SHAPE FILE ROUTER`.

A stream that ends is followed by another. Each line of standard input is answered with a line:
`steady` (once nearly all streams of the Shape have a token) and `count` with its counts so far,
`finish` with those when no stream is open any more, `end` with those so far; after these two it
exits, writing the send time of each Start to FILE. The first streams end at different times, so
that later ones start evenly distributed.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import uvloop
from scale.shape import MARKS, MODEL, Shape, prompts
from systems.eventually import eventually
from systems.single_processes import trusted

from pdserve.gateway.router_client.session import RouterConnection
from pdserve.protos import common_pb2 as pb
from pdserve.protos.router_pb2 import GatewayMessage, RequestEvent
from pdserve.services.common.auth.certificates import Role
from pdserve.services.common.rpc import TokenRow

AGAIN_S = 2.0  # after a failed stream another one is tried
RAMP_S = 0.004  # between the first Starts
STEADY_S = 60.0  # after the last Start, whether or not all streams have started by then
NEARLY = 0.98
TIMEOUT_MS = 600_000
QUEUE_MS = 60_000


@dataclass(eq=False, slots=True)
class Open:
    """A stream that has not ended."""

    gateway: RouterConnection
    num_tokens: int
    seen: int = 0


class Streams:
    """Listen to all sessions and count: a token is lost if a later one arrives first, repeated if
    it has arrived before, wrong if it is not its position's token."""

    def __init__(self, shape: Shape) -> None:
        self.counts = dict.fromkeys(
            ("starts", "tokens", "ended", "short", "lost", "repeated", "wrong", "failed"), 0
        )
        self.sent: dict[str, float] = {}  # when, by request
        self.failures: dict[str, int] = {}
        self.goes_on = True
        self.none_open = asyncio.Event()
        self.num_up = 0
        self._shape = shape
        self._open: dict[str, Open] = {}
        self._rng = Random(1)
        self._prompts = prompts(shape, self._rng)

    @property
    def num_running(self) -> int:
        return sum(1 for one in self._open.values() if one.seen)

    def nearly_all_run(self) -> bool:
        return self.num_running >= NEARLY * self._shape.streams

    def start(self, gateway: RouterConnection, num_tokens: int) -> None:
        name = f"req-{len(self.sent)}-{os.getpid()}"
        self._open[name] = Open(gateway, num_tokens)
        params = pb.SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
        start = pb.Start(
            request=name, epoch=1, model=MODEL, prompt_ids=next(self._prompts), params=params,
            seed=1, remaining_ms=TIMEOUT_MS, queue_remaining_ms=QUEUE_MS,
        )  # fmt: skip
        self.counts["starts"] += 1
        self.sent[name] = time.monotonic()
        gateway.send(GatewayMessage(start=start))

    def first(self, gateway: RouterConnection) -> None:
        self.start(gateway, self._rng.randint(2, self._shape.answer_len))

    # RouterListener

    def up(self, session: RouterConnection) -> None:
        self.num_up += 1

    def down(self, session: RouterConnection) -> None:
        self.num_up -= 1

    def rows(self, session: RouterConnection, rows: Iterable[TokenRow]) -> None:
        for choice, position, id_ in rows:
            self._take(choice.request, position, id_)

    def event(self, session: RouterConnection, event: RequestEvent) -> None:
        match event.WhichOneof("event"):
            case "tokens":
                tokens = event.tokens
                for offset, id_ in enumerate(tokens.ids):
                    self._take(tokens.request, tokens.position + offset, id_)
            case "finished":
                self._end(event.finished.request)
            case "failed":
                self.counts["failed"] += 1
                message = event.failed.failure.message
                self.failures[message] = self.failures.get(message, 0) + 1
                stream = self._open.pop(event.failed.request)
                loop = asyncio.get_running_loop()
                loop.call_later(AGAIN_S, self.first, stream.gateway)

    def _take(self, name: str, position: int, id_: int) -> None:
        counts, stream = self.counts, self._open.get(name)
        if stream is None or position < stream.seen:
            counts["repeated"] += 1
            return
        counts["tokens"] += 1
        counts["lost"] += position - stream.seen
        counts["wrong"] += id_ != position % MARKS
        stream.seen = position + 1

    def _end(self, name: str) -> None:
        stream = self._open.pop(name)
        self.counts["ended"] += 1
        self.counts["short"] += stream.seen != stream.num_tokens
        if self.goes_on:
            self.start(stream.gateway, self._shape.answer_len)
        elif not self._open:
            self.none_open.set()


async def answer(commands: asyncio.StreamReader, streams: Streams, shape: Shape) -> None:
    async for line in commands:
        command = line.strip()
        if command == b"steady":
            limit_s = STEADY_S + RAMP_S * shape.streams
            with suppress(TimeoutError):
                await eventually(streams.nearly_all_run, "streams", limit_s)
        elif command == b"finish":
            streams.goes_on = False
            await streams.none_open.wait()
        found: dict[str, Any] = {"running": streams.num_running, "at": time.monotonic()}
        print(json.dumps(streams.counts | found | {"failures": streams.failures}), flush=True)
        if command in (b"finish", b"end"):
            return


async def run(certificates: Path, shape: Shape, router: str) -> dict[str, float]:
    """Run the gateways; returns the send time of each Start."""
    access = trusted(certificates, Role.GATEWAY)
    streams = Streams(shape)
    gateways = [
        RouterConnection(router, access, os.urandom(16), streams) for _ in range(shape.gateways)
    ]
    await eventually(lambda: streams.num_up == len(gateways), "sessions")
    commands = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    answering = asyncio.create_task(answer(commands, streams, shape))
    for number in range(shape.streams):
        streams.first(gateways[number % len(gateways)])
        await asyncio.sleep(RAMP_S)
    await answering
    for gateway in gateways:
        await gateway.close()
    return streams.sent


def main() -> None:
    certificates, shape, file, router = sys.argv[1:]
    sent = uvloop.run(run(Path(certificates), Shape.from_json(shape), router))
    Path(file).write_text(json.dumps(sent))


if __name__ == "__main__":
    main()
