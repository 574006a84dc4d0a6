"""Line 3: tool parsers pass their fixtures; answers constrained by 500 random schemas validate,
whole and streamed, with remote prefill, and with decode workers killed in the middle: the tokens
equal those of the undisturbed run. line3_speed.py compares the speed with free decoding.

    .venv/bin/python benchmarks/api/line3_structured.py [--schemas 60] [--first 0]
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from typing import Any

import httpx
import jsonschema
from builders.random_schemas import random_schema
from pytest_line import run_tests
from systems.fleet import Fleet

MODEL = "SmolLM2-135M-Instruct"
NUM_SCHEMAS, WIDTH = 500, 16
NUM_KILLS = 6  # at even shares of the answers
PARSERS = ("tools", "tool_fixtures", "reasoning")
MAX_TOKENS = 1500
LONG = "The quick brown fox jumps over the lazy dog. " * 20
OPTIONS = ("--prefill", "1", "--decode", "2", "--kv-tokens", "65536", "--threads", "1")


def bodies(schemas: Sequence[Any]) -> list[dict[str, Any]]:
    """The requests; every second prompt is long, so that a prefill worker computes it."""
    return [
        {
            "model": MODEL,
            "messages": [
                {"role": "user", "content": f"{i} {LONG if i % 2 else ''}Write JSON."},
            ],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema, "strict": True},
            },
            "seed": i,
            "max_tokens": MAX_TOKENS,
            "return_token_ids": True,
            "cache_salt": f"salt {i}",
        }
        for i, schema in enumerate(schemas)
    ]


class Run:
    """One run of all bodies, WIDTH at a time."""

    def __init__(self, url: str, stream: bool) -> None:
        self._url, self._stream = url, stream
        self.open: set[int] = set()
        self.under_way: set[int] = set()  # started requests that have tokens
        self.answers: dict[int, tuple[str, list[int], str]] = {}  # text, ids, finish
        self.errors: list[str] = []

    async def all(self, asked: Sequence[dict[str, Any]]) -> None:
        gate = asyncio.Semaphore(WIDTH)
        async with httpx.AsyncClient(base_url=self._url, timeout=900) as client:

            async def one(i: int) -> None:
                async with gate:
                    self.open.add(i)
                    try:
                        await self._one(client, i, asked[i])
                    except Exception as error:
                        self.errors.append(f"{i}: {type(error).__name__}: {error}"[:300])
                    self.open.discard(i)
                    self.under_way.discard(i)

            await asyncio.gather(*map(one, range(len(asked))))

    async def _one(self, client: httpx.AsyncClient, i: int, body: dict[str, Any]) -> None:
        path = "/v1/chat/completions"
        if not self._stream:
            answer = await client.post(path, json=body)
            (choice,) = answer.raise_for_status().json()["choices"]
            text, ids = choice["message"]["content"], choice["token_ids"]
            self.answers[i] = text, ids, choice["finish_reason"]
            return
        text, ids, finish = "", [], ""
        async with client.stream("POST", path, json={**body, "stream": True}) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(str(event["error"]))
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    ids += choice.get("token_ids") or []
                    finish = choice["finish_reason"] or finish
                    if ids:
                        self.under_way.add(i)
        self.answers[i] = text, ids, finish


async def with_kills(run: Run, asked: Sequence[dict[str, Any]], fleet: Fleet) -> list[int]:
    """A run with a decode worker killed at even shares of the first half of its answers; also the
    number of running answers at each kill. (A worker takes seconds to restart.) No request
    experiences two kills, since it would be given up as poison."""
    working = asyncio.create_task(run.all(asked))
    under_way: list[int] = []
    hit: set[int] = set()
    while not (await asyncio.wait([working], timeout=0.05))[0] and len(under_way) < NUM_KILLS:
        if len(run.answers) * 2 * NUM_KILLS < len(asked) * len(under_way):
            continue
        if hit & run.open or len(run.under_way) < WIDTH // 2:
            continue
        pids = await asyncio.to_thread(fleet.pids, "decode")
        if len(pids) < 2:
            continue  # the previous one has not restarted
        under_way.append(len(run.under_way))
        hit = set(run.open)
        os.kill(random.Random(len(under_way)).choice(pids), signal.SIGKILL)
    await working
    return under_way


def judge(run: Run, schemas: Sequence[Any], calm: Run | None = None) -> dict[str, Any]:
    """The number of answers that ended, that validate, and that equal those of the undisturbed
    run."""
    valid = 0
    wrong: list[str] = []
    for i, (text, _, finish) in sorted(run.answers.items()):
        try:
            validator = jsonschema.Draft202012Validator(
                schemas[i], format_checker=jsonschema.FormatChecker()
            )
            validator.validate(json.loads(text))
            valid += finish == "stop"
        except (ValueError, jsonschema.ValidationError) as error:
            wrong.append(f"{i} ({finish}): {str(error).splitlines()[0]}"[:200])
    alike = (
        len(run.answers)
        if calm is None
        else sum(calm.answers.get(i) == answer for i, answer in run.answers.items())
    )
    ok = valid == alike == len(schemas)
    return {
        "ok": ok,
        "valid": valid,
        "as_calm": alike,
        "errors": run.errors[:5],
        "wrong": wrong[:5],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=NUM_SCHEMAS)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first schema")
    options = parser.parse_args()
    schemas = [random_schema(options.first + i, finite=True) for i in range(options.schemas)]
    asked = bodies(schemas)
    tests = [f"tests/gateway/text/test_{name}.py" for name in PARSERS]
    figures: dict[str, Any] = {"parsers": run_tests(*tests)}
    with Fleet(*OPTIONS, "--open-metrics", "--remote-prefill", "always") as fleet:
        calm, streamed, killed = (Run(fleet.url, stream) for stream in (False, True, True))
        asyncio.run(calm.all(asked))
        figures["calm"] = judge(calm, schemas)
        remote = fleet.prefills("remote")
        figures["remote"] = {"ok": remote > 0.8 * len(asked), "prefills": remote}
        asyncio.run(streamed.all(asked))
        figures["streamed"] = judge(streamed, schemas, calm)
        under_way = asyncio.run(with_kills(killed, asked, fleet))
        figures["killed"] = judge(killed, schemas, calm) | {"under_way": under_way}
        figures["killed"]["ok"] &= len(under_way) >= min(NUM_KILLS, len(asked) // (2 * WIDTH))
    figures["ok"] = all(part["ok"] for part in figures.values())
    print(json.dumps(figures))
    return not figures["ok"]


if __name__ == "__main__":
    sys.exit(main())
