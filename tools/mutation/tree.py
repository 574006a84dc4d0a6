"""A working copy of the repository with a separate environment, in which mutants are tested."""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

BUILD_PACKAGES = (
    "scikit-build-core>=1.1",
    "hatch-fancy-pypi-readme>=24.1",
    "nanobind>=2",
    "grpcio-tools==1.80.0",
)
# Set in the environment of every process that a run has started. It has no prefix PDSERVE_, because
# pdserve refuses unknown variables with that prefix.
MARK = "MUTATION_TREE"
# The output of pytest -v when a test ends, and at the end for files that it cannot import.
FAILED = re.compile(r"^(tests/.+?) (?:SUB)?(?:FAILED|ERROR)\b|^ERROR (tests/\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """The result of a pytest run: its exit code (None: it took too long) and the first failure."""

    code: int | None
    failed: str
    seconds: float
    output: str


class Tree:
    """A working copy: `folder` is a clone of `source` at its HEAD. Packages are those of the
    environment that runs this program; only pdserve itself is installed."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.root = folder
        self._python = folder / ".venv/bin/python"
        self._site = folder / f".venv/lib/python{sysconfig.get_python_version()}/site-packages"
        # Installed separately: grpcio-tools requires an older protobuf.
        self._build_packages = folder / "build/packages"
        if self._python.exists():
            _call("git", "-C", str(folder), "fetch", "-q", str(source.resolve()), "HEAD")
            _call("git", "-C", str(folder), "checkout", "-q", "--force", "FETCH_HEAD")
        else:
            _call("git", "clone", "-q", str(source), str(folder))
            _call(sys.executable, "-m", "venv", str(folder / ".venv"))
            (self._site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
            shutil.copy(Path(sysconfig.get_path("purelib")) / "a1_coverage.pth", self._site)
            self._pip("--target", str(self._build_packages), *BUILD_PACKAGES)
            for schemas in (source / "build").glob("*.tgz"):
                shutil.copy(schemas, folder / "build")
        self.install()  # an earlier run may have left the extension of a mutant
        self.commit = _call("git", "-C", str(folder), "rev-parse", "HEAD").strip()

    def install(self) -> None:
        """Build the extension and the stubs; only changed files are compiled.

        Raises CalledProcessError if the sources do not compile.
        """
        self._pip(
            *("--no-build-isolation", "--no-deps", "-e", str(self.root)),
            PYTHONPATH=str(self._build_packages),
        )

    def extension(self) -> Path:
        return next(self._site.glob("pdserve/kernels/_native*.so"))

    def write(self, path: str, text: str) -> None:
        """Replace a source file, and delete Python's compiled copies of it."""
        file = self.root / path
        file.write_text(text)
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
            compiled.unlink()

    def restore(self, path: str) -> None:
        _call("git", "-C", str(self.root), "checkout", "-q", "--", path)
        self.write(path, (self.root / path).read_text())

    def pytest(self, words: Sequence[str], limit_s: float, **environment: str) -> Run:
        started = time.monotonic()
        arguments = self.root / "build/arguments.txt"
        arguments.write_text("\n".join(words))
        command = [
            str(self._python),
            "-m",
            "pytest",
            "-v",
            "-p",
            "no:cacheprovider",
            f"@{arguments}",
        ]
        out = self.root / "build/output.txt"
        with out.open("w") as stdout:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=os.environ | {MARK: str(self.root)} | environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                self._end_processes()
                process.wait()
        output = out.read_text(errors="replace")
        failure = FAILED.search(output)
        failed = (failure[1] or failure[2]) if failure else ""
        return Run(code, failed, time.monotonic() - started, output)

    def _end_processes(self) -> None:
        """End every process that carries this tree's mark: tests start processes in separate
        sessions."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == str(self.root):
                    process.send_signal(signal.SIGKILL)

    def _pip(self, *words: str, **environment: str) -> None:
        quiet = ("--disable-pip-version-check", "-q")
        _call(str(self._python), "-m", "pip", "install", *quiet, *words, **environment)


def _call(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command,
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout
