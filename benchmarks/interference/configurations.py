"""The systems to compare, and one run of one of them.

Every system is `pdserve up` on the same two cores: two workers with one thread, each pinned to a
separate core; gateway, router and this client may run on both.
"""

import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import psutil
from interference.arrivals import LONG, SHAPES, SHORT, Schedule, prompt_ids
from interference.client import PlannedRequest, open_loop, request_body
from interference.figures import SEPARATED, Answer, summary
from systems.fleet import Fleet
from systems.sources import ROOT
from weights import reference_tokenizer

CHUNKS = (64, 128, 256, 512, 1024)
KV_TOKENS = "131072"  # of each worker: no request waits for blocks
MAX_RUNNING = "16"  # of each worker: a larger batch gives no more tokens per second on one core
WARM_UP = (LONG, LONG, SHORT, SHORT, SHORT, SHORT)  # before a run, with separate prompts
WARM_UP_FROM = 1_000_000  # their numbers
OPTIONS: dict[str, tuple[str, ...]] = {
    SEPARATED: ("--prefill", "1", "--decode", "1"),
    **{
        f"mixed-{chunk}": ("--prefill", "0", "--decode", "2", "--chunk-size", str(chunk))
        for chunk in CHUNKS
    },
}
SILENT = {"PDSERVE_LOG_LEVEL": "warning"}


def system(name: str) -> Fleet:
    """A configuration by its name, to be started."""
    return Fleet(*OPTIONS[name], "--kv-tokens", KV_TOKENS, "--max-running", MAX_RUNNING, env=SILENT)


class Prompts:
    """Prepared requests for one system."""

    def __init__(self, url: str) -> None:
        tokenizer = reference_tokenizer()
        texts = [(ROOT / name).read_text() for name in ("benchmarks/text/prose.txt", "LICENSE")]
        self._text = tokenizer.encode("\n\n".join(texts))
        self._vocab = len(tokenizer)
        listed = httpx.get(f"{url}/v1/models", timeout=30).raise_for_status().json()
        self._model = str(listed["data"][0]["id"])

    def ask(self, kind: str, number: int, at_s: float = 0.0) -> PlannedRequest:
        """Request `number` of a kind, to be sent at a time."""
        ids = prompt_ids(self._text, self._vocab, kind, number)
        return PlannedRequest(kind, at_s, request_body(self._model, ids, SHAPES[kind].new))

    def all_of(self, schedule: Schedule) -> list[PlannedRequest]:
        return [self.ask(a.kind, a.number, a.at_s) for a in schedule.arrivals]


def processor_s(fleet: Fleet) -> dict[str, float]:
    """Processor time so far of every process of a system, and of this one."""
    used = {"client": time.process_time()}
    for role in ("gateway", "router", "prefill", "decode"):
        for number, pid in enumerate(sorted(fleet.pids(role))):
            times = psutil.Process(pid).cpu_times()
            used[f"{role} {number}"] = times.user + times.system
    return used


def warm_up(fleet: Fleet, prompts: Prompts) -> None:
    """Run both kinds of request on every worker before anything is measured. Raises RuntimeError if
    one fails."""
    requests = [prompts.ask(kind, WARM_UP_FROM + n) for n, kind in enumerate(WARM_UP)]
    if len(asyncio.run(open_loop(fleet.url, requests))) < len(requests):
        raise RuntimeError("the system does not answer")


def run(name: str, schedule: Schedule) -> dict[str, Any]:
    """One run: the raw answers and the summary."""
    with system(name) as fleet:
        prompts = Prompts(fleet.url)
        requests = prompts.all_of(schedule)
        warm_up(fleet, prompts)
        before, local, remote = processor_s(fleet), *_prefills(fleet)
        started = time.monotonic()
        answers = asyncio.run(open_loop(fleet.url, requests))
        lasted = time.monotonic() - started
        after = processor_s(fleet)
        moved = [a - b for a, b in zip(_prefills(fleet), (local, remote), strict=True)]
    figures = summary(answers, schedule.seconds)
    figures["failed"] = len(requests) - len(answers)
    figures["prefills"] = dict(zip(("local", "remote"), moved, strict=True))
    figures["cores_used"] = {k: round((after[k] - v) / lasted, 3) for k, v in before.items()}
    figures["load"] = round(os.getloadavg()[0], 2)
    rounded = [
        asdict(answer) | {"events_s": [round(at, 5) for at in answer.events_s]}
        for answer in answers
    ]
    return {"summary": figures, "answers": rounded}


def _prefills(fleet: Fleet) -> tuple[int, int]:
    return fleet.prefills("local"), fleet.prefills("remote")


def write(path: Path, result: dict[str, Any]) -> None:
    """Write the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(result))
    new.replace(path)


def read_answers(result: dict[str, Any]) -> Sequence[Answer]:
    return [Answer(**{**a, "events_s": tuple(a["events_s"])}) for a in result["answers"]]
