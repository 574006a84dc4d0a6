"""A gateway over the agents' model in a network with only a loopback interface.

Clients run in the same network, each with an empty home folder and an empty work folder.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOKEN_S = 0.01
IDLE_MS = "3000"  # clients that can limit it give up a stream after this silence
STOP_S = 20
RUN_S = 240
PROGRAMS = ("unshare", "nsenter", "ip")
# Clients get only these variables of the caller's environment.
KEPT = ("PATH", "LANG", "TZ")


class Loopback:
    """Context manager: `with Loopback(folder) as loopback`. All files go to `folder`."""

    def __init__(self, folder: Path, context_len: int = 131072, **settings: Any) -> None:
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        if missing:
            pytest.skip(f"a network with loopback alone needs {', '.join(missing)}")
        if os.geteuid() != 0:
            pytest.skip("a network with loopback alone needs root")
        self._folder = folder
        self.context_len = context_len
        self._settings = settings
        self._num_runs = 0
        self.home = folder / "home"
        self.work = folder / "work"
        self._served = folder / "gateway"
        for own in (self.home, self.work, self._served):
            own.mkdir()

    def __enter__(self) -> "Loopback":
        arguments = [self._served, self.context_len, TOKEN_S, json.dumps(self._settings)]
        with (self._served / "log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    *("unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"),
                    *(sys.executable, str(Path(__file__).parent / "serve.py")),
                    *map(str, arguments),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT / "tests/support")},
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(STOP_S)
            if "Operation not permitted" in self.log:
                pytest.skip("this container may not make a network with loopback alone")
            raise AssertionError(self.log)
        self.url: str = json.loads(line)["url"]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    @property
    def log(self) -> str:
        """Return what the gateway has logged."""
        return (self._served / "log").read_text()

    @property
    def notes(self) -> list[dict[str, Any]]:
        """Return what the model has recorded about each request (AgentModel)."""
        file = self._served / "notes.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def run(
        self, *words: str | Path, stdin: str = "", exit_codes: tuple[int, ...] = (0,), **env: str
    ) -> str:
        """Return what a client's command prints to both of its streams; fail on another exit
        code.
        """
        inside = ["nsenter", f"--net=/proc/{self._process.pid}/ns/net", "--"]
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        process = subprocess.run(
            [*inside, *map(str, words)],
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_S,
            cwd=self.work,
            env={**kept, "HOME": str(self.home), "BASE_URL": self.url, **env},
        )
        (self._served / f"client-{len(list(self._served.glob('client-*')))}").write_text(
            process.stdout
        )
        assert process.returncode in exit_codes, f"{process.stdout[-6000:]}\n{self.log[-3000:]}"
        return process.stdout
