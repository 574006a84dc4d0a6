"""Concurrent greedy streams without a pause, each compared with its answer without disturbance.

Every request has a unique cache salt, so a long prompt is prefilled again each time.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

TIMEOUT_S = 600.0  # of silence
WORDS = "one two three four five six seven eight nine ten eleven twelve "
# The contents of a stream, so far or at the end: text, finish reason, tokens.
Answer = tuple[str, str, int]


class Broken(Exception):
    """A stream that had begun ended early."""


@dataclass(frozen=True)
class Ask:
    prompt: str
    max_tokens: int

    def body(self, model: str, salt: str) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": salt,
        }


def asks() -> list[Ask]:
    """Long prompts (about 1,000 tokens) and short ones, alternating."""
    long = [Ask(f"Story {n}: " + WORDS * 80 + "And then", 32) for n in range(4)]
    short = [Ask(f"Number {n} comes after {WORDS * (n % 3)}", 64) for n in range(8)]
    return [ask for pair in zip(short, long * 2, strict=True) for ask in pair]


Chunks = Callable[[dict[str, Any]], AsyncIterator[dict[str, Any]]]


class RawClient:
    """A client with one connection per request and no retries."""

    def __init__(self, url: str, key: str) -> None:
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {key}"},
            timeout=TIMEOUT_S,
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self.most_retries = 0

    async def chunks(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async with self._client.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                raise RuntimeError(f"{reply.status_code}: {(await reply.aread()).decode()}")
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    async def close(self) -> None:
        await self._client.aclose()


class OpenAiClient:
    """The openai package, which retries refused or unanswered requests."""

    def __init__(self, url: str, key: str, max_retries: int) -> None:
        self.most_retries = 0
        self._http = httpx.AsyncClient(
            timeout=TIMEOUT_S, event_hooks={"request": [self._count], "response": []}
        )
        self._client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=key, max_retries=max_retries, http_client=self._http
        )

    async def _count(self, request: httpx.Request) -> None:
        count = int(request.headers.get("x-stainless-retry-count", 0))
        self.most_retries = max(self.most_retries, count)

    async def chunks(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        salt = {"cache_salt": body["cache_salt"]}
        known = {name: value for name, value in body.items() if name not in salt}
        stream = await self._client.completions.create(**known, extra_body=salt)
        async for chunk in stream:
            yield chunk.model_dump()

    async def close(self) -> None:
        await self._client.close()


@dataclass
class Load:
    """`width` clients that cycle through the prompts until they are stopped."""

    chunks: Chunks
    model: str
    calm: dict[Ask, Answer] = field(default_factory=dict)
    completed: int = 0
    unequal: int = 0
    running: int = 0  # streams that have begun and not ended
    failed: list[str] = field(default_factory=list)  # refused, or not answered
    broken: list[str] = field(default_factory=list)  # after their first token
    where: str = ""  # the container that is being restarted
    _numbers: Any = field(default_factory=itertools.count)
    _over: bool = False

    async def ask(self, ask: Ask) -> Answer:
        """Send one prompt. Raises Broken if the stream ends early, and the client's exceptions."""
        text, finish, tokens = "", "", 0
        begun = False
        try:
            async for chunk in self.chunks(ask.body(self.model, f"salt {next(self._numbers)}")):
                if not begun and chunk.get("choices"):
                    begun = True
                    self.running += 1
                if "error" in chunk:
                    raise Broken(str(chunk["error"]))
                for choice in chunk.get("choices", ()):
                    text += choice["text"]
                    finish = choice["finish_reason"] or finish
                if chunk.get("usage"):
                    tokens = chunk["usage"]["completion_tokens"]
        except (httpx.HTTPError, openai.OpenAIError) as error:
            if not begun:
                raise
            raise Broken(repr(error)) from error
        finally:
            self.running -= begun
        if not finish or not tokens:
            raise Broken(f"the stream ended after {text!r}")
        return text, finish, tokens

    async def learn(self, all_asks: Sequence[Ask]) -> None:
        """Send each prompt once without disturbance."""
        for ask in all_asks:
            self.calm[ask] = await self.ask(ask)

    async def run(self, width: int) -> None:
        """Run until `stop` was called and the last stream has ended."""
        turns = itertools.cycle(self.calm)
        await asyncio.gather(*(self._client(turns) for _ in range(width)))

    def stop(self) -> None:
        self._over = True

    async def _client(self, turns: Any) -> None:
        while not self._over:
            ask = next(turns)
            try:
                answer = await self.ask(ask)
            except Broken as error:
                self.broken.append(f"{self.where}: {error}")
            except (httpx.HTTPError, openai.OpenAIError, RuntimeError) as error:
                self.failed.append(f"{self.where}: {error!r}")
                await asyncio.sleep(0.2)  # limits retries after a refusal
            else:
                self.completed += 1
                self.unequal += answer != self.calm[ask]
