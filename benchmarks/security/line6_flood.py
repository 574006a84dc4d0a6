"""Line 6: beside a key that floods a route, another key's time to first token stays within TIMES of
its value alone.

For each route of REST and gRPC that a client can call (floods.py): ROUNDS of a calm part and a
flooded one in turn; the ratio is of the p99 of times to first token of ASKS requests, the figure
the median of the rounds. Words: names of floods, all without any; `--any-load` as in cpu/bench.py.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from fleet import Fleet
from floods import FLOODS, MODEL

sys.path.append(str(Path(__file__).parents[1] / "cpu"))

import machine

TIMES = 2.0
ROUNDS, ASKS, BEGINS_S = 5, 100, 1.0


def first_token_s(client: httpx.Client, number: int) -> float:
    body = {"model": MODEL, "prompt": f"{number} is a number", "max_tokens": 2, "stream": True}
    began = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if '"text"' in line:
                return time.perf_counter() - began
    raise RuntimeError("no token came")


def p99(client: httpx.Client, first: int) -> float:
    times = [first_token_s(client, number) for number in range(first, first + ASKS)]
    return statistics.quantiles(times, n=100)[98]


@contextmanager
def flooded(fleet: Fleet, name: str) -> Iterator[Counter[str]]:
    """The statuses that the flood has got, once it is over."""
    statuses: Counter[str] = Counter()
    words = [name, fleet.url.removeprefix("http://"), fleet.grpc, fleet.router]
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("floods.py")), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n", "the flood has ended"
        time.sleep(BEGINS_S)
        try:
            yield statuses
        finally:
            process.stdin.close()
            statuses.update(json.loads(process.stdout.read()))


def measure(fleet: Fleet, name: str) -> dict[str, Any]:
    alone, beside, flood_s = [], [], 0.0
    rounds: list[Counter[str]] = []  # the flood's answers
    key = {"authorization": "Bearer good"}
    with httpx.Client(base_url=fleet.url, timeout=120, headers=key) as client:
        for number in range(ROUNDS):
            alone.append(p99(client, 1000 * number))
            began = time.perf_counter()
            with flooded(fleet, name) as statuses:
                beside.append(p99(client, 1000 * number + 500))
                flood_s += time.perf_counter() - began
            rounds.append(statuses)
    answers = sum(rounds, Counter())
    fewest = min(each.total() for each in rounds)
    ratio = statistics.median(b / a for a, b in zip(alone, beside, strict=True))
    return {
        "ok": ratio <= TIMES and fewest > 0 and not answers.keys() - FLOODS[name].expected,
        "p99_alone_ms": round(1e3 * statistics.median(alone), 1),
        "p99_beside_ms": round(1e3 * statistics.median(beside), 1),
        "ratio": round(ratio, 2),
        "flood_answers": dict(answers),
        "flood_answers_per_s": round(answers.total() / flood_s),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("floods", nargs="*", choices=[*FLOODS, []])
    parser.add_argument("--any-load", action="store_true")
    args = parser.parse_args()
    load = machine.quiet(machine.two_cores(), args.any_load)
    found = {}
    with Fleet("--api-key", "good", "--api-key", "flood", certificates=True) as fleet:
        for name in args.floods or FLOODS:
            found[name] = measure(fleet, name)
            print(name, found[name], file=sys.stderr, flush=True)
    ok = found.keys() == FLOODS.keys() and all(part["ok"] for part in found.values())
    print(json.dumps({"ok": ok, "load_by_others": round(load, 3), "routes": found}))


if __name__ == "__main__":
    main()
