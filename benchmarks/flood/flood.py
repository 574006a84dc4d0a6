"""The time to first token of one key while another one floods a route, relative to its value alone.

For each route of REST and gRPC that a client can call (floods.py): ROUNDS of a calm part and a
flooded one alternately, each for VICTIMS, requests with a short prompt and with a typical one, all
of new text. The ratio is of the p99 of times to first token of their requests, the figure the
median of the rounds.

The flood's process runs at `nice -n 19`: a real client runs on another machine and takes none of
the server's processor; on two cores it would. Arguments: names of floods, all by default;
`--any-load` as in cpu/bench.py.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import httpx
import machine
from floods import FLOODS, LONG, MODEL
from systems.fleet import Fleet

ROUNDS, BEGINS_S = 5, 1.0
ASKS = {"short": 100, "typical": 20}  # in each part; of 20, p99 is nearly the longest
numbers = count()  # of the victims' prompts
NICE = ("nice", "-n", "19")
WORDS = LONG.split()[:12]


def typical(number: int) -> str:
    """About 200 tokens that no other number begins with."""
    return " ".join(Random(number).choices(WORDS, k=200))


VICTIMS: dict[str, Callable[[int], str]] = {
    "short": lambda number: f"{number} is a number",
    "typical": typical,
}


def first_token_s(client: httpx.Client, prompt: str) -> float:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "stream": True}
    began = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if '"text"' in line:
                return time.perf_counter() - began
    raise RuntimeError("no token came")


def p99s(client: httpx.Client) -> dict[str, float]:
    """The p99 of each kind of victim."""
    found = {}
    for kind, prompt in VICTIMS.items():
        times = [first_token_s(client, prompt(next(numbers))) for _ in range(ASKS[kind])]
        found[kind] = statistics.quantiles(times, n=100, method="inclusive")[98]
    return found


@contextmanager
def flooded(fleet: Fleet, name: str) -> Iterator[Counter[str]]:
    """The statuses that the flood has received, once it is over."""
    statuses: Counter[str] = Counter()
    words = [name, fleet.url.removeprefix("http://"), fleet.grpc, fleet.router]
    with subprocess.Popen(
        [*NICE, sys.executable, str(Path(__file__).with_name("floods.py")), *words],
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
    alone, beside, paces = [], [], []  # of each round
    answers: Counter[str] = Counter()  # the flood's
    key = {"authorization": "Bearer good"}
    with httpx.Client(base_url=fleet.url, timeout=120, headers=key) as client:
        for _ in range(ROUNDS):
            alone.append(p99s(client))
            began = time.perf_counter()
            with flooded(fleet, name) as statuses:
                beside.append(p99s(client))
                took = time.perf_counter() - began
            paces.append(statuses.total() / took)
            answers += statuses
    victims = {
        kind: {
            "p99_alone_ms": round(1e3 * statistics.median(a[kind] for a in alone), 1),
            "p99_beside_ms": round(1e3 * statistics.median(b[kind] for b in beside), 1),
            "ratio": round(
                statistics.median(b[kind] / a[kind] for a, b in zip(alone, beside, strict=True)), 2
            ),
        }
        for kind in VICTIMS
    }
    return {
        **victims,
        "flood_answers": dict(answers),
        "flood_answers_per_s": round(statistics.median(paces), 1),
        "flood_answers_per_s_least": round(min(paces), 1),
    }


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
    print(json.dumps({"load_by_others": round(load, 3), "routes": found}))


if __name__ == "__main__":
    main()
