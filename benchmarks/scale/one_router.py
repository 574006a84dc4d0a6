"""One router at its share: a real process between fake workers and the sessions of fake gateways.

Its cost is the processor time of its process, independent of other load on the machine. Times
between processes are by the machine's one monotonic clock; they include the fakes' delays.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scale.processes import (
    END_S,
    GIVES_WAY,
    HERE,
    Processes,
    cpu_s,
    free_address,
    memory_mib,
    read_line,
    stop,
)
from scale.shape import Shape
from systems.eventually import wait_until

from pdserve.cli.load import spread
from pdserve.services.common.auth.certificates import Role

SETTLE_S = 2.0  # after the last join or first token
START_S = 60.0
STEADY_S = 90.0  # for all streams to have started; the fakes give up earlier
ANSWER_S = 20.0
FINISH_S = 60.0
AMISS = ("short", "lost", "repeated", "wrong", "failed")
COUNTS = ("starts", "ended", "tokens", *AMISS)


class Late(Exception):
    """The streams do not reach their number: the machine does not carry them."""


def spread_ms(seconds: list[float]) -> dict[str, float]:
    """Spread of times, in milliseconds."""
    if not seconds:
        return {}
    figures = spread(seconds)
    return {name: round(figures[name], 3) for name in ("mean", "p50", "p99")}


def measure(
    shape: Shape, window_s: float, finish: bool = False, nice: int = GIVES_WAY
) -> dict[str, Any]:
    """Figures of one router that carries the Shape. `finish`: wait until every stream has ended, so
    that all are counted to their last token. `nice`: of the fakes. Raises Late."""
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder), nice) as processes:
        return _OneRouter(processes, shape).measure(window_s, finish)


class _OneRouter:
    """The processes of one measurement."""

    def __init__(self, processes: Processes, shape: Shape) -> None:
        self._processes = processes
        self._shape = shape
        self._files = {
            name: processes.folder / f"{name}.json" for name in ("placed", "admitted", "sent")
        }
        address = free_address()
        words = ["--bind", address, *processes.words(Role.ROUTER)]
        script, placed = str(HERE / "timed_router.py"), str(self._files["placed"])
        self._router = processes.start(sys.executable, script, placed, *words)
        wait_until(lambda: processes.fleet(address), "the router", START_S)
        self._empty_mib = memory_mib(self._router.pid)
        words = [shape.to_json(), str(self._files["admitted"]), address]
        self._fleet = processes.fake("fake_workers.py", *words)
        if not read_line(self._fleet, START_S):
            raise Late("the workers do not start")
        processes.wait_joined(address, shape.workers)
        time.sleep(SETTLE_S)
        self._joined_mib, self._settled = memory_mib(self._router.pid), time.monotonic()
        self._gateways: subprocess.Popen[bytes] | None = None
        if shape.streams:
            words = [shape.to_json(), str(self._files["sent"]), address]
            self._gateways = processes.fake("fake_gateways.py", *words)
            self._ask("steady", STEADY_S)
            time.sleep(SETTLE_S)

    def measure(self, window_s: float, finish: bool) -> dict[str, Any]:
        pids = [p.pid for p in (self._router, self._fleet, self._gateways) if p is not None]
        before, began, used = self._ask("count"), time.monotonic(), list(map(cpu_s, pids))
        time.sleep(window_s)
        after, ended = self._ask("count"), time.monotonic()
        seconds = ended - began
        cores = [(cpu_s(pid) - u) / seconds for pid, u in zip(pids, used, strict=True)]
        found = {
            "shape": json.loads(self._shape.to_json()),
            "core": round(cores[0], 4),
            "fakes_cores": [round(share, 3) for share in cores[1:]],
            "rss_mib": round(memory_mib(self._router.pid), 1),
            "joined_mib": round(self._joined_mib - self._empty_mib, 1),
        }
        if self._gateways is not None:
            demanded = self._shape.streams * self._shape.tokens_s * seconds
            found["carried"] = round((after["tokens"] - before["tokens"]) / demanded, 4)
            found |= self._streams(finish)
        noted = self._noted()
        looks = [one for one in noted["looks"] if began <= one[0] <= ended]
        found["reports_s"] = round((looks[-1][2] - looks[0][2]) / seconds)
        found["wait_for_loop_ms"] = spread_ms([late for _, late, _, _ in looks])
        # Until the end of the window: a router that shuts down reads no messages.
        isolated = [at for at, _, _, isolated in noted["looks"] if isolated and at <= ended]
        found["isolated_s_after_settling"] = [round(at - self._settled, 1) for at in isolated]
        found["exact"] = found.get("exact", True) and not isolated
        if self._gateways is not None:
            found |= self._placing([one for one in noted["placed"] if began <= one[1] <= ended])
        return found

    def _streams(self, finish: bool) -> dict[str, Any]:
        """The outcome of the streams over the whole run."""
        last_s = self._shape.answer_len / self._shape.tokens_s
        counts = self._ask("finish", FINISH_S + last_s) if finish else self._ask("end")
        return {
            "counts": {name: counts[name] for name in COUNTS},
            "exact": not any(counts[name] for name in AMISS),
            "failures": counts["failures"],
        }

    def _noted(self) -> dict[str, Any]:
        """End the processes and return the router's records."""
        if self._gateways is not None:
            self._gateways.wait(END_S)  # it exits by itself, and with it the sessions
        stop(self._router)
        stop(self._fleet)
        return dict(json.loads(self._files["placed"].read_text()))

    def _placing(self, placed: list[tuple[str, float, float, float]]) -> dict[str, Any]:
        """Placing times of these requests."""
        admitted, sent = (json.loads(self._files[n].read_text()) for n in ("admitted", "sent"))
        return {
            "placed": len(placed),
            "placing_cpu_ms": spread_ms([cpu for _, _, _, cpu in placed]),
            "placing_ms": spread_ms([took for _, _, took, _ in placed]),
            "sent_to_placing_ms": spread_ms([at - sent[name] for name, at, _, _ in placed]),
            "sent_to_admit_ms": spread_ms(
                [admitted[name] - sent[name] for name, *_ in placed if name in admitted]
            ),
        }

    def _ask(self, command: str, limit_s: float = ANSWER_S) -> dict[str, Any]:
        """The gateways' counts, once they answer; empty without gateways. Raises Late."""
        if self._gateways is None:
            return {}
        assert self._gateways.stdin is not None
        self._gateways.stdin.write(f"{command}\n".encode())
        self._gateways.stdin.flush()
        line = read_line(self._gateways, limit_s)
        if not line:
            raise Late(f"no answer to {command} within {limit_s:g} s")
        return dict(json.loads(line))
