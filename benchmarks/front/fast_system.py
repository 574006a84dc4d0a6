"""A router, a gateway and a decode worker with the fast model, in separate processes."""

import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import psutil
from front.clock import StepClock
from systems.single_processes import SingleProcesses, files_of

from pdserve.services.common.auth.certificates import Role

FAST_DECODE = Path(__file__).parent / "fast_decode.py"
ROLES = (Role.GATEWAY, Role.ROUTER, Role.DECODE)


class FastSystem(SingleProcesses):
    """A running system: `with FastSystem(step_s) as system` answers at `system.http`. `chunk_s` is
    the time of a prompt chunk."""

    def __init__(self, step_s: float, chunk_s: float = 0.0) -> None:
        self._made = tempfile.TemporaryDirectory()
        super().__init__(Path(self._made.name))
        self.step_s = step_s
        self.chunk_s = chunk_s
        self.clock_path = self.folder / "clock"
        self.clock = StepClock(str(self.clock_path))

    def __enter__(self) -> "FastSystem":
        super().__enter__()
        self.start(Role.ROUTER, "--remote-prefill", "never")
        self._start_decode()
        self.http = self.new_address()
        self.start(Role.GATEWAY, "--port", self.http.split(":")[1])
        self.wait_joined()
        self.wait_for(self._answers, "the gateway")
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._made.cleanup()

    def _start_decode(self) -> None:
        authority, own, key = files_of(self.certificates, Role.DECODE)
        self.address[Role.DECODE] = self.new_address()
        times = str(self.step_s), str(self.chunk_s)
        command = [sys.executable, str(FAST_DECODE), str(self.clock_path), *times]
        command += ["--cluster-ca", authority, "--cluster-cert", own, "--cluster-key", key]
        command += ["--bind", self.address[Role.DECODE], "--routers", self.address[Role.ROUTER]]
        with (self.folder / "decode.log").open("wb") as log:
            self.processes[Role.DECODE] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def _answers(self) -> bool:
        try:
            return httpx.get(f"http://{self.http}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def cpu_s(self) -> dict[Role, float]:
        """The CPU seconds of each process, without its children."""
        found = {}
        for role in ROLES:
            times = psutil.Process(self.processes[role].pid).cpu_times()
            found[role] = times.user + times.system
        return found
