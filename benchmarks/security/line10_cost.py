"""Line 10: the cost of certificates, text processes and fair turns: requests per second of `pdserve
up` against the commit before them, and hand-offs sealed and plain.

requests: the model is tiny and random, so that the gateway is measured; it must be the process that
computes most. Both systems run, and get requests alternately: from WORKERS clients for SECONDS,
then from one for ALONE_S, each time for one token of a short chat, streamed; the other system must
be at rest then. They are started STARTS times, since two starts of one commit also differ. The
ratio is of a pair of turns, now to before. transfers: the same for the copies by tcp and by shm
that `make bench-transfer ARGS="quick copies"` measures; its other rows are not compared. Arguments:
names of parts, both by default; `--any-load` as in cpu/bench.py.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import earlier
import psutil
from builders.tiny_models import write_tiny
from systems.fleet import READY, Fleet

sys.path.append(str(earlier.ROOT / "benchmarks/cpu"))

import machine
from client import ask

BEFORE = "fea97e4"
LEAST, STARTS, PAIRS, SECONDS, ALONE_S, WORKERS = 0.95, 4, 5, 5.0, 2.0, 16
COPIES = 3  # pairs
AT_REST = 0.1  # of a core that a system without requests may use
MODEL = "tiny"
BODY = {
    "model": MODEL, "messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 1,
    "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
}  # fmt: skip
Seconds = Counter[tuple[str, int]]  # of the cores, by role and pid


class EarlierFleet(Fleet):
    """`pdserve up` of another commit, in its environment."""

    def __init__(self, home: Path, *options: str) -> None:
        super().__init__(*options, certificates=True)
        self.home = home

    def __enter__(self) -> "EarlierFleet":
        command = [str(self.home / ".venv/bin/python"), "-P", "-m", "pdserve.services.cli.main"]
        self.process = subprocess.Popen(
            [*command, "up", "--port", "0", "--grpc-port", "0", *self.options],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": ""},
        )  # fmt: skip
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := READY.search(line.decode()):
                self.url = found[2]
                return self
        raise RuntimeError("the earlier system did not start")

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        self.process.communicate(timeout=60)


class Side:
    """One of the two systems, which may be restarted, with its measurements."""

    fleet: Fleet

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.num_asked = 0
        self.p50_s: list[float] = []  # of one client's requests
        self.busy: Seconds = Counter()  # during its turns
        self.rest: list[float] = []  # cores in use during the other system's turns

    def cpu(self) -> Seconds:
        """CPU seconds of each of its processes so far."""
        found: Seconds = Counter()
        for child in psutil.Process(self.fleet.process.pid).children(recursive=True):
            spent = child.cpu_times()
            found[child.name().split()[0], child.pid] = spent.user + spent.system
        return found

    def measure(self, idle: "Side") -> None:
        before, others = self.cpu(), idle.cpu().total()
        began = time.perf_counter()
        answers = asyncio.run(ask_for(self.fleet.url, SECONDS, WORKERS))
        took = time.perf_counter() - began
        self.busy.update(self.cpu() - before)
        self.num_asked += len(answers)
        idle.rest.append((idle.cpu().total() - others) / took)
        self.rates.append(len(answers) / took)
        self.p50_s.append(statistics.median(asyncio.run(ask_for(self.fleet.url, ALONE_S, 1))))

    def figures(self) -> dict[str, Any]:
        by_role: Counter[str] = Counter()
        for (role, _), seconds in self.busy.items():
            by_role[role] += seconds
        ((busiest, _), _), *_ = self.busy.most_common(1)
        return {
            "ok": busiest == "gateway" and max(self.rest) <= AT_REST,
            "per_s": round(statistics.median(self.rates), 1),
            "p50_ms": round(1e3 * statistics.median(self.p50_s), 2),
            "busiest": busiest,
            "share": {r: round(s / self.busy.total(), 3) for r, s in by_role.most_common()},
            "cpu_ms": {r: round(1e3 * s / self.num_asked, 2) for r, s in by_role.most_common()},
            "cores_at_rest": round(max(self.rest), 3),
        }


async def ask_for(url: str, seconds: float, workers: int) -> list[float]:
    """The duration of each request, with this many clients."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(BODY).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    request = (head + "Connection: close\r\n\r\n").encode() + body
    began = time.perf_counter()
    took: list[float] = []

    async def one() -> None:
        while time.perf_counter() - began < seconds:
            took.append((await ask(host, int(port), request)).last_s)

    await asyncio.gather(*(one() for _ in range(workers)))
    return took


def requests(home: Path, model: Path) -> dict[str, Any]:
    options = ("--prefill", "0", "--decode", "1", "--model", str(model))
    now, before = Side(), Side()
    for number in range(STARTS):
        with ExitStack() as stack:
            starts = (
                lambda: begin(now, Fleet(*options, certificates=True), stack),
                lambda: begin(before, EarlierFleet(home, *options), stack),
            )
            for start in starts if number % 2 else starts[::-1]:
                start()
            take_turns(now, before)
    ratio = statistics.median(a / b for a, b in zip(now.rates, before.rates, strict=True))
    added = statistics.median(a - b for a, b in zip(now.p50_s, before.p50_s, strict=True))
    sides = {"now": now.figures(), "before": before.figures()}
    return {
        "ok": ratio >= LEAST and all(side["ok"] for side in sides.values()),
        "ratio": round(ratio, 3),
        "p50_added_ms": round(1e3 * added, 2),
        **sides,
        "starts": STARTS,
        "pairs": STARTS * PAIRS,
    }


def begin(side: Side, fleet: Fleet, stack: ExitStack) -> None:
    """Start the system, and send requests until it is warm."""
    side.fleet = stack.enter_context(fleet)
    asyncio.run(ask_for(fleet.url, SECONDS, WORKERS))


def take_turns(now: Side, before: Side) -> None:
    for number in range(PAIRS):
        order = [(now, before), (before, now)]
        for side, idle in order if number % 2 else order[::-1]:
            side.measure(idle)


def copies(python: Path, root: Path) -> dict[str, Any]:
    """Shares of a bare socket's rate, as line 5 of the hand-off prints them."""
    done = subprocess.run(
        [str(python), str(root / "benchmarks/handoff/line5_transfer.py"), "quick", "copies"],
        cwd=root, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": f"{root}/benchmarks:{root}/tests/support"},
    )  # fmt: skip
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def transfers(home: Path, model: Path) -> dict[str, Any]:
    python = ".venv/bin/python"
    pairs = [
        (copies(earlier.ROOT / python, earlier.ROOT), copies(home / python, home))
        for _ in range(COPIES)
    ]
    moved = {
        name: statistics.median(
            now["copies"]["gb_s"][name] / before["copies"]["gb_s"][name] for now, before in pairs
        )
        for name in ("tcp", "shm")
    }
    return {
        "ok": min(moved.values()) >= LEAST,
        **{f"{name}_now_to_before": round(ratio, 3) for name, ratio in moved.items()},
        "sealed_of_bare": [now["copies"]["tcp_sealed_of_bare"] for now, _ in pairs],
        "plain_of_bare": [now["copies"]["tcp_of_bare"] for now, _ in pairs],
    }


PARTS = {"requests": requests, "transfers": transfers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--any-load", action="store_true")
    args = parser.parse_args()
    home = earlier.build(BEFORE)
    load = machine.quiet(machine.two_cores(), args.any_load)
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny(Path(folder) / MODEL, "llama")
        found = {name: PARTS[name](home, model) for name in args.parts or PARTS}
    ok = found.keys() == PARTS.keys() and all(part["ok"] for part in found.values())
    print(json.dumps({"ok": ok, "load_by_others": round(load, 3), **found}))


if __name__ == "__main__":
    main()
