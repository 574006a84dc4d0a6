"""A closed-loop client: each worker sends its next request when the last one has ended.

Raw HTTP/1.1 over asyncio in one process, so that its share of the cores is small and the same for
every server. Streams are not parsed token by token; lengths are checked in the usage object.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

END = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Answer:
    """The duration of one request, and the token counts of the server."""

    first_s: float
    last_s: float
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Wave:
    """All requests of one closed-loop run."""

    answers: tuple[Answer, ...]
    wall_s: float
    failed: int = 0  # streams that broke

    @property
    def tokens_per_s(self) -> float:
        return sum(a.completion_tokens for a in self.answers) / self.wall_s

    @property
    def first_p50_s(self) -> float:
        return statistics.median(a.first_s for a in self.answers)


def request_bytes(host: str, model: str, ids: Sequence[int], new: int) -> bytes:
    """A streaming completion of exactly `new` tokens."""
    body = json.dumps(
        {
            "model": model,
            "prompt": list(ids),
            "max_tokens": new,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def usage_in(stream: bytes) -> dict[str, int]:
    """The usage object of a finished stream; raises RuntimeError if it has none."""
    for line in reversed(stream.splitlines()):
        if line.startswith(b"data: {"):
            usage = json.loads(line[len(b"data: ") :]).get("usage")
            if usage:
                return dict(usage)
    raise RuntimeError(f"no usage in the answer: {stream[:500]!r}")


async def ask(host: str, port: int, request: bytes) -> Answer:
    """Send one request over a separate connection; raises RuntimeError unless the stream is
    complete."""
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        first_s = 0.0
        pieces: list[bytes] = []
        while piece := await reader.read(65536):
            if not first_s and b"data: {" in piece:
                first_s = time.perf_counter() - started
            pieces.append(piece)
            if END in piece:
                break
        last_s = time.perf_counter() - started
    finally:
        writer.close()
    stream = b"".join(pieces)
    if not stream.startswith(b"HTTP/1.1 200") or END not in stream or not first_s:
        raise RuntimeError(f"not a whole stream: {stream[:500]!r}")
    usage = usage_in(stream)
    return Answer(first_s, last_s, usage["prompt_tokens"], usage["completion_tokens"])


async def closed_loop(
    url: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    new: int,
    workers: int,
    spares: Sequence[Sequence[int]] = (),
) -> Wave:
    """Get an answer to every prompt; raises RuntimeError if a length differs from the request.

    The prompt of a stream that breaks is replaced by one of `spares`, and the time counts for the
    server.
    """
    host, _, port = url.removeprefix("http://").partition(":")
    waiting = [request_bytes(host, model, ids, new) for ids in reversed(prompts)]
    answers: list[Answer] = []
    broken = 0

    async def work() -> None:
        nonlocal broken
        while waiting:
            try:
                answers.append(await ask(host, int(port), waiting.pop()))
            except RuntimeError:
                if broken == len(spares):
                    raise
                waiting.append(request_bytes(host, model, spares[broken], new))
                broken += 1

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(work())
    wall_s = time.perf_counter() - started
    lengths = {(a.prompt_tokens, a.completion_tokens) for a in answers}
    if lengths != {(len(prompts[0]), new)}:
        raise RuntimeError(f"lengths {lengths}, not {(len(prompts[0]), new)}")
    return Wave(tuple(answers), wall_s, broken)
