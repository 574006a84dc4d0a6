"""Sixteen kinds of concurrently streamed completions, and the results that a fault must not
change.

Every batch has a separate tenant, so that no prompt is found in a cache and each long one is
computed by a prefill worker and sent.
"""

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
STOPPED = "stop"  # the kind that ends by a stop string
TIMEOUT_S = 90.0


@dataclass
class Stream:
    """One request and its result."""

    kind: str
    body: dict[str, Any]
    id: str = ""
    text: dict[int, str] = field(default_factory=dict)  # by choice, as all that follows
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    num_events: int = 0  # with text
    status: int = 0
    error: str = ""
    over: bool = False

    @property
    def answer(self) -> tuple[Any, ...]:
        """Return the whole answer to the client, except ids and times."""
        return self.text, self.logprobs, self.ends, self.usage

    @property
    def under_way(self) -> bool:
        """Return whether it has some of its tokens, but not all."""
        return self.num_events > 0 and not self.ends and not self.over

    async def run(self, http: httpx.AsyncClient) -> None:
        try:
            async with http.stream("POST", "/v1/completions", json=self.body) as reply:
                self.status = reply.status_code
                if reply.status_code != 200:
                    self.error = (await reply.aread()).decode()
                    return
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line[6:]))
        except httpx.HTTPError as error:
            self.error = repr(error)
        finally:
            self.over = True
            if not self.error and (not self.usage or len(self.ends) != self.body.get("n", 1)):
                self.error = f"ended without an end: {self.ends}"

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = json.dumps(event["error"])
            return
        self.id = event["id"]
        self.usage = event["usage"] or self.usage
        for choice in event["choices"]:
            index = choice["index"]
            self.num_events += 1
            self.text[index] = self.text.get(index, "") + choice["text"]
            if choice["logprobs"]:
                scores = choice["logprobs"]
                rows = zip(*(scores[name] for name in sorted(scores)), strict=True)
                self.logprobs.setdefault(index, []).extend(map(list, rows))
            if choice["finish_reason"]:
                self.ends[index] = choice["finish_reason"]


def kinds(num_tokens: int) -> dict[str, dict[str, Any]]:
    """Return kinds by name. All prompts except two are longer than the threshold of a remote
    prefill.
    """
    longs = [f"Number {n}: " + WORDS * (4 + n % 5) for n in range(16)]  # 350 to 700 tokens
    greedy = {"temperature": 0.0}
    seeded = {"temperature": 1.0, "seed": 7}
    found = {
        "greedy": greedy,
        "greedy of length": {**greedy, "max_tokens": num_tokens // 2},
        "seeded": seeded,
        "seeded, top_p": {**seeded, "top_p": 0.8, "seed": 8},
        "seeded, top_k, min_p": {**seeded, "top_k": 20, "min_p": 0.02, "seed": 9},
        "penalties": {**greedy, "presence_penalty": 0.7, "frequency_penalty": 0.4},
        "seeded penalties": {**seeded, "repetition_penalty": 1.2, "repeat_last_n": 40, "seed": 10},
        "logprobs": {**greedy, "logprobs": 3},
        "seeded logprobs": {**seeded, "logprobs": 2, "seed": 11},
        "n=2": {**seeded, "n": 2, "seed": 12},
        "n=2 logprobs": {**seeded, "n": 2, "logprobs": 1, "seed": 13},
        "echo": {**greedy, "echo": True},
        "echo logprobs": {**greedy, "echo": True, "logprobs": 1},
        "min_tokens": {**seeded, "min_tokens": 20, "ignore_eos": False, "seed": 14},
        "short": {**greedy, "prompt": "Short. " + WORDS},
        STOPPED: {**seeded, "seed": 15},
    }
    common = {"max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    common["stream_options"] = {"include_usage": True}
    return {
        kind: {"prompt": prompt, **common, **own}
        for prompt, (kind, own) in zip(longs, found.items(), strict=True)
    }


class Clients:
    """Runs streams on a separate thread; the test watches them and strikes."""

    def __init__(self, url: str, num_tokens: int, stop: str = "") -> None:
        self.url = url
        self.stop = stop
        self._kinds = kinds(num_tokens)
        self._num_batches = 0
        model = httpx.get(f"{url}/v1/models", timeout=20).raise_for_status().json()
        self._model = model["data"][0]["id"]

    def batch(self, num: int = 16) -> list[Stream]:
        """Return one stream of each kind, for a separate tenant."""
        self._num_batches += 1
        tenant = f"batch {self._num_batches} at {time.monotonic_ns()}"
        made = []
        for kind, body in list(self._kinds.items())[-num:]:
            stop = {"stop": [self.stop]} if kind == STOPPED and self.stop else {}
            salt = {"model": self._model, "cache_salt": f"{tenant} {kind}"}
            made.append(Stream(kind, {**body, **salt, **stop}))
        return made

    def start(self, streams: Sequence[Stream]) -> threading.Thread:
        """Start streams, which run until the thread ends."""
        thread = threading.Thread(target=lambda: asyncio.run(self._run(streams)), name="clients")
        thread.start()
        return thread

    async def _run(self, streams: Sequence[Stream]) -> None:
        limits = httpx.Limits(max_connections=len(streams))
        async with httpx.AsyncClient(
            base_url=self.url, timeout=TIMEOUT_S, limits=limits, trust_env=False
        ) as http:
            await asyncio.gather(*(stream.run(http) for stream in streams))

    def run(self, streams: Sequence[Stream]) -> None:
        self.start(streams).join()


def reference(clients: Clients) -> dict[str, Stream]:
    """Return the fault-free answers by kind; from now on one kind ends by a string from its
    text.
    """
    first = clients.batch()
    clients.run(first)
    assert not any(s.error for s in first), [s.error for s in first if s.error]
    text = next(s for s in first if s.kind == STOPPED).text[0]
    clients.stop = next(
        text[at : at + 2]
        for at in range(len(text) * 3 // 5, len(text) - 1)
        if text.find(text[at : at + 2]) == at and text[at : at + 2].isprintable()
    )
    whole = clients.batch()
    clients.run(whole)
    by_kind = {s.kind: s for s in whole}
    assert by_kind[STOPPED].ends == {0: "stop"}
    differ = wrong([one for one in first if one.kind != STOPPED], by_kind)
    assert not differ, differ
    return by_kind


def wrong(streams: Sequence[Stream], whole: dict[str, Stream]) -> list[str]:
    """Return differences from the fault-free run, in words."""
    found = [f"{s.kind}: {s.error}" for s in streams if s.error]
    for stream in streams:
        for name, got, want in zip(
            ("text", "logprobs", "ends", "usage"),
            stream.answer,
            whole[stream.kind].answer,
            strict=True,
        ):
            if not stream.error and got != want:
                there, wanted = repr(got), repr(want)
                pairs = enumerate(zip(there, wanted, strict=False))
                first = next((n for n, (one, other) in pairs if one != other), len(wanted))
                at = max(0, first - 20)
                there, wanted = there[at : at + 80], wanted[at : at + 80]
                differs = f"{name} has {there} at {at}, not {wanted}"
                found.append(f"{stream.kind} {stream.id}: {differs}")
    return found
