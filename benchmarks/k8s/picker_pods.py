"""A router, pods of a decode worker and a gateway on separate addresses, and pickers."""

import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from systems.single_processes import PDSERVE, SingleProcesses, files_of

from pdserve.services.common.auth.certificates import Role

FAST_DECODE = Path(__file__).parents[1] / "front/fast_decode.py"
STEP_S, CHUNK_S = 0.002, 0.002


class PickerPods(SingleProcesses):
    """Running pods: `with PickerPods(num) as pods` stops all processes at its end."""

    def __init__(self, num: int) -> None:
        self._temporary = tempfile.TemporaryDirectory()
        super().__init__(Path(self._temporary.name))
        self.hosts = [f"127.0.7.{number}" for number in range(1, num + 1)]
        self.router, self.picker, self.proxy = (self.new_address() for _ in range(3))
        self._metrics, self._http, self._decode = (
            self.new_address().split(":")[1] for _ in range(3)
        )

    @property
    def endpoints(self) -> list[str]:
        return [f"{host}:{self._http}" for host in self.hosts]

    def __enter__(self) -> "PickerPods":
        super().__enter__()
        try:
            self._start("router", Role.ROUTER, "--bind", self.router, "--metrics-port", "0")
            for host in self.hosts:
                self._start_pod(host)
            self.wait_for(self._all_ready, "the pods")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        with suppress(OSError):
            self._temporary.cleanup()

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def start_picker(self, *words: str) -> None:
        """Start a picker; returns when it serves."""
        said = ["--bind", self.picker, "--routers", self.router]
        for endpoint in self.endpoints:
            said += ["--endpoints", endpoint]
        self._start(
            "picker", Role.GATEWAY, *said, "--metrics-port", self._metrics, *words,
            command="picker",
        )  # fmt: skip
        self.wait_for(self._picker_serves, "the picker")
        time.sleep(1.5)  # until the tokenizer is loaded

    def _start_pod(self, host: str) -> None:
        words = ["--bind", f"{host}:{self._decode}", "--data-bind", f"{host}:0"]
        fast = [sys.executable, str(FAST_DECODE), str(self.folder / f"clock {host}")]
        self._start(
            f"decode {host}", Role.DECODE, *words, "--routers", self.router,
            start=[*fast, str(STEP_S), str(CHUNK_S)],
        )  # fmt: skip
        where = ["--host", host, "--port", self._http, "--routers", self.router]
        self._start(f"gateway {host}", Role.GATEWAY, *where, "--text-processes", "1")

    def _start(
        self, name: str, role: Role, *words: str, command: str = "", start: list[str] | None = None
    ) -> None:
        authority, own, key = files_of(self.certificates, role)
        trust = ["--cluster-ca", authority, "--cluster-cert", own, "--cluster-key", key]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [*(start or [*PDSERVE, command or role]), *words, *trust, "--drain-s", "1"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _all_ready(self) -> bool:
        with suppress(httpx.TransportError):
            return all(
                httpx.get(f"http://{one}/ready", timeout=5).status_code == 200
                and httpx.get(f"http://{one}/metrics", timeout=5).text.count("decode") > 0
                for one in self.endpoints
            ) and self._num_decodes() == len(self.hosts)
        return False

    def _num_decodes(self) -> int:
        page = httpx.get(f"http://{self.endpoints[0]}/metrics", timeout=5).text
        rows = [row for row in page.splitlines() if row.startswith("vllm:num_requests_running")]
        return len([row for row in rows if "127.0.7." in row])

    def _picker_serves(self) -> bool:
        with grpc.insecure_channel(self.picker) as channel, suppress(grpc.RpcError):
            request = health_pb2.HealthCheckRequest(service="readiness")
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
            return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
        return False

    def picker_figures(self) -> dict[str, float]:
        """The metrics of a picker."""
        page = httpx.get(f"http://127.0.0.1:{self._metrics}/metrics", timeout=5).text
        rows = [row.rsplit(" ", 1) for row in page.splitlines() if not row.startswith("#")]
        return {name: float(value) for name, value in rows}

    def decisions(self) -> dict[str, int]:
        """The picker's decisions, by reason."""
        begin = 'pdserve_picker_decisions_total{reason="'
        return {
            name.removeprefix(begin).removesuffix('"}'): int(value)
            for name, value in self.picker_figures().items()
            if name.startswith(begin)
        }

    def decided_within(self, *seconds: float) -> dict[str, float]:
        """The share of the picker's decisions that took at most this long."""
        figures, name = self.picker_figures(), "pdserve_picker_decision_seconds"
        num = max(1.0, figures[f"{name}_count"])
        return {f"{s} s": round(figures[f'{name}_bucket{{le="{s}"}}'] / num, 4) for s in seconds}

    def cpu_s(self, name: str) -> float:
        """CPU seconds of a process and its children."""
        process = psutil.Process(self.processes[name].pid)
        every = [process, *process.children(recursive=True)]
        return sum(one.cpu_times().user + one.cpu_times().system for one in every)
