"""Line 6: metric names match a running system, and every alert fires for its cause and for nothing
else.

The tests create each cause with the real objects and evaluate the rules over it with promtool. In
addition, a real Prometheus scrapes real processes here, with the rules' minutes as seconds: no
alert fires while all is well, each expression of the boards returns data, and killed workers and
routers are noticed.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import yaml
from alerts_page import page
from oracles.promql import expressions
from pytest_line import run_tests
from systems.single_processes import SingleProcesses

from pdserve.services.host.auth.roles import Role

TESTS = (
    "tests/k8s/observability",
    "tests/system/test_observability.py",
    "tests/services/test_sums.py",
    "tests/services/router/test_router_metrics.py",
)
WELL_S, SEEN_S = 40.0, 60.0
ASKED = {"model": "SmolLM2-135M-Instruct", "prompt": "hello " * 600, "max_tokens": 4}
# Expressions without data here: no errors, mismatched pairs or failed moves occur.
QUIET = {
    "fleet: Requests a second B",
    "handoff: Pairs left out, by what differs A",
    "handoff: Between KV identities B",
    "handoff: Moves between decode workers C",
}
DURATION = re.compile(r"\b(\d+)([mh])\b")


class Watched(SingleProcesses):
    """A router, its workers and a gateway, each with a port for metrics, and a Prometheus."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.scraped: dict[str, str] = {}

    def begin(self) -> None:
        self.start_role(Role.ROUTER)
        self.start_role(Role.PREFILL)
        self.start_role(Role.DECODE)
        self.scraped["gateway"] = self.new_address()
        port = self.scraped["gateway"].partition(":")[2]
        self.start(Role.GATEWAY, "--port", port, "--no-fleet-metrics", "--queue-timeout-s", "1")
        self.wait_joined()
        self._start_prometheus()

    def start_role(self, role: Role) -> None:
        """Start a role, or restart it at the same metrics port."""
        address = self.scraped.setdefault(str(role), self.new_address())
        words = ["--metrics-port", address.partition(":")[2]]
        if role is not Role.ROUTER:
            words += ["--kv-tokens", "4096", "--threads", "1"]
        self.start(role, *words)

    def kill(self, role: Role) -> None:
        self.processes[role].send_signal(signal.SIGKILL)
        self.processes[role].wait()

    def _start_prometheus(self) -> None:
        jobs = [
            {"job_name": f"pdserve-{role}", "static_configs": [{"targets": [address]}]}
            for role, address in self.scraped.items()
        ]
        often = {"scrape_interval": "250ms", "scrape_timeout": "250ms"}
        config = {
            "global": often | {"evaluation_interval": "250ms"},
            "rule_files": ["alerts.yml"],
            "scrape_configs": jobs,
        }
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        (self.folder / "alerts.yml").write_text(quicker(page()))
        address = self.new_address()
        self.url = f"http://{address}/api/v1"
        with (self.folder / "prometheus.log").open("wb") as log:
            self.prometheus = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self.folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self.folder / 'data'}",
                    f"--web.listen-address={address}",
                ],
                stdout=log,
                stderr=log,
            )

    def __exit__(self, *exc: object) -> None:
        if hasattr(self, "prometheus"):
            self.prometheus.terminate()
            self.prometheus.wait()
        super().__exit__(*exc)

    def ask(self) -> int:
        """The status code of a response; 0 without one."""
        with suppress(httpx.HTTPError):
            url = f"http://{self.scraped['gateway']}/v1/completions"
            return httpx.post(url, json=ASKED, timeout=20).status_code
        return 0

    def query(self, expression: str) -> list[Any]:
        answer = httpx.get(f"{self.url}/query", params={"query": expression}).json()
        assert answer["status"] == "success", (expression, answer)
        found: list[Any] = answer["data"]["result"]
        return found

    def firing(self) -> set[str]:
        with suppress(httpx.HTTPError):  # not started yet
            alerts = httpx.get(f"{self.url}/alerts").json()["data"]["alerts"]
            return {a["labels"]["alertname"] for a in alerts if a["state"] == "firing"}
        return set()

    def fires(self, name: str, meanwhile: Callable[[], object] = lambda: None) -> float | None:
        """Seconds until the alert fires; None if it does not."""
        began = time.monotonic()
        while time.monotonic() - began < SEEN_S:
            meanwhile()
            if name in self.firing():
                return round(time.monotonic() - began, 1)
            time.sleep(0.2)
        return None


def quicker(rules: str) -> str:
    """The rules with minutes as seconds, and hours as minutes."""
    return DURATION.sub(lambda found: found[1] + {"m": "s", "h": "m"}[found[2]], rules)


def watched(folder: Path) -> dict[str, Any]:
    """The alerts that a real Prometheus reports for real processes."""
    with Watched(folder) as system:
        system.begin()
        false: set[str] = set()
        began, answered = time.monotonic(), 0
        while time.monotonic() - began < WELL_S:
            answered += system.ask() == 200
            if time.monotonic() - began > WELL_S / 2:  # lets the metrics of the start expire
                false |= system.firing()
        empty = [
            where
            for where, expression in expressions().items()
            if not where.startswith("alert")
            and not system.query(expression.replace("$__rate_interval", "30s"))
        ]
        seen: dict[str, float | None] = {}
        system.kill(Role.DECODE)
        seen["PdserveNoDecodeWorker"] = system.fires("PdserveNoDecodeWorker")
        seen["PdserveErrorRatioHigh"] = system.fires("PdserveErrorRatioHigh", system.ask)
        for _ in range(3):
            system.start_role(Role.DECODE)
            system.wait_joined()
            system.kill(Role.DECODE)
        seen["PdserveWorkersFlapping"] = system.fires("PdserveWorkersFlapping")
        system.kill(Role.ROUTER)
        seen["PdserveNoRouter"] = system.fires("PdserveNoRouter")
    return {
        "ok": answered > 3 and not false and None not in seen.values() and set(empty) <= QUIET,
        "answered": answered,
        "fired in health": sorted(false),
        "seconds until it fired": seen,
        "expressions of boards without data": empty,
    }


def main() -> int:
    figures: dict[str, Any] = {"tests": run_tests(*TESTS)}
    if shutil.which("prometheus") is None:
        figures["prometheus"] = {"ok": True, "skipped": "Debian's package prometheus is missing"}
    else:
        with TemporaryDirectory() as folder:
            figures["prometheus"] = watched(Path(folder))
    figures["ok"] = all(part["ok"] for part in figures.values())
    print(json.dumps(figures))
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
