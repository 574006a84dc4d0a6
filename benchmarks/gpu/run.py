"""Measure the GPU part in one call, on a machine with a GPU and without network, in at most 590
seconds: `make bench-gpu ARGS=prepare` on a machine with network, `make bench-gpu` there.

Each part is a separate process (parts/), so that a fault in one does not affect another, and is
killed when its time is over. The JSON is written after each part: every part has a status (done,
failed, skipped or out of time), the reason, its seconds and its figures. The last line printed is
the same object; the exit code is 0 if every part is done, 1 if one failed, 2 if none failed but
some could not run.

`--fake`: all parts on a CPU, with kernels interpreted and tiny sizes; its figures mean nothing.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from installation import ROOT, build, environment, install, prepare

LIMIT_S = 590.0
SPARE_S = 3.0  # to write the result and exit
PARTS = Path(__file__).with_name("parts")
DONE, FAILED, SKIPPED, OUT_OF_TIME = "done", "failed", "skipped", "out of time"


class Planned(NamedTuple):
    """A part and its time limit in seconds; `beside`: it runs concurrently with that part, since
    neither measures time."""

    name: str
    most_s: float
    needs_build: bool = True
    beside: str = ""


ORDER = (
    Planned("facts", 60, needs_build=False),
    Planned("kernels", 120, needs_build=False),
    Planned("invariance", 200),
    Planned("handed_over", 120, beside="invariance"),
    Planned("system", 150, beside="invariance"),
    Planned("kills", 200, beside="invariance"),
    Planned("sanitizer", 200, beside="invariance"),
    Planned("handoff", 60),
    Planned("throughput", 180),
)


class Run:
    """One call; its result is in the file after each part."""

    def __init__(self, options: argparse.Namespace, folder: Path, started_s: float) -> None:
        self.fake: bool = options.fake
        self._smallest: bool = options.smallest
        self._folder, self._out = folder, options.out
        self._ends_s = started_s + options.seconds - SPARE_S
        self._started_s = started_s
        self._lock = threading.Lock()
        self.result: dict[str, Any] = {
            "name": "bench-gpu",
            "fake": self.fake,
            "commit": commit(),
            "limit_s": options.seconds,
            "parts": {},
        }

    def note(self, name: str, status: str, reason: str, seconds: float, **more: Any) -> None:
        """Write the file atomically."""
        about = {"status": status, "reason": reason, "seconds": round(seconds, 1)}
        with self._lock:
            self.result["parts"][name] = {k: v for k, v in about.items() if v != ""} | more
            self.result["seconds"] = round(time.monotonic() - self._started_s, 1)
            beside = self._out.with_suffix(".new")
            beside.write_text(json.dumps(self.result, indent=1) + "\n")
            beside.rename(self._out)
        print(f"{name}: {status} {reason}", file=sys.stderr, flush=True)

    @property
    def left_s(self) -> float:
        return self._ends_s - time.monotonic()

    def part(self, planned: Planned) -> None:
        """Run a part; everything that it starts ends with it."""
        limit_s = min(planned.most_s, self.left_s)
        if limit_s < 1:
            self.note(planned.name, OUT_OF_TIME, "no time was left to start it", 0.0)
            return
        started = time.monotonic()
        words = [sys.executable, str(PARTS / f"{planned.name}.py"), "--folder", str(self._folder)]
        words += ["--seconds", f"{limit_s:.1f}", *(["--fake"] if self.fake else [])]
        words += ["--smallest"] if self._smallest else []
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment(self.fake), stdout=sys.stderr, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        path = self._folder / f"{planned.name}.json"
        record = json.loads(path.read_text()) if path.exists() else {"figures": {}, "skipped": {}}
        status, reason = outcome(record, code, limit_s)
        self.note(planned.name, status, reason, time.monotonic() - started, **record)


def outcome(record: dict[str, Any], code: int | None, limit_s: float) -> tuple[str, str]:
    """(status, reason) of a part that ended with that code; None: it was killed."""
    skipped = "; ".join(f"{name}: {reason}" for name, reason in record["skipped"].items())
    if code is None:
        return OUT_OF_TIME, f"it took more than {limit_s:.0f} s"
    if record.get("error") or code:
        return FAILED, record.get("error", f"its process ended with {code}")
    if record["figures"]:
        return DONE, f"except {skipped}" if skipped else ""
    return (SKIPPED, skipped) if skipped else (FAILED, "it has written no figures")


def commit() -> str:
    """The commit; empty if the tree has no git history."""
    words = ["git", "rev-parse", "--short=12", "HEAD"]
    with suppress(OSError):
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return ""


def built(run: Run, begun: "subprocess.Popen[bytes]", started: float) -> bool:
    """Wait for the build."""
    try:
        code: int | None = begun.wait(max(1.0, run.left_s))
    except subprocess.TimeoutExpired:
        os.killpg(begun.pid, signal.SIGKILL)
        code = None
    status = {0: DONE, None: OUT_OF_TIME}.get(code, FAILED)
    run.note("build", status, "" if not code else "see its output", time.monotonic() - started)
    return code == 0


def groups(order: list[Planned]) -> list[list[Planned]]:
    """Groups of parts that run together."""
    found: list[list[Planned]] = []
    for planned in order:
        if found and found[-1][0].name == planned.beside:
            found[-1].append(planned)
        else:
            found.append([planned])
    return found


def all_parts(run: Run, names: list[str], wheels: Path) -> None:
    """Run all parts; the build runs concurrently with the parts that do not need it."""
    started = time.monotonic()
    begun = subprocess.Popen(
        [sys.executable, __file__, "build", "--wheels", str(wheels)],
        stdout=sys.stderr,
        start_new_session=True,
    )
    is_built: bool | None = None
    try:
        for together in groups([one for one in ORDER if not names or one.name in names]):
            if together[0].needs_build and is_built is None:
                is_built = built(run, begun, started)
            if together[0].needs_build and not is_built:
                for planned in together:
                    run.note(planned.name, SKIPPED, "pdserve.kernels._native was not built", 0.0)
            else:
                with ThreadPoolExecutor() as threads:
                    list(threads.map(run.part, together))
    finally:
        if begun.poll() is None:
            os.killpg(begun.pid, signal.SIGKILL)


def obstacle() -> str:
    """The reason why nothing can be tested here."""
    script = "import torch; assert torch.cuda.is_available()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True)
    return "torch finds no GPU here: --fake tries the parts" if done.returncode else ""


def main() -> int:
    started_s = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("word", choices=("run", "prepare", "build"), nargs="?", default="run")
    parser.add_argument("--parts", nargs="+", default=[], metavar="PART", help="only these")
    parser.add_argument("--fake", action="store_true", help="a CPU, tiny sizes")
    parser.add_argument("--smallest", action="store_true", help="the fewest sizes of each part")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="for all of it")
    parser.add_argument("--out", type=Path, default=ROOT / "build/bench-gpu.json")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".whl", help="where they are")
    options = parser.parse_args()
    if options.word == "prepare":
        return prepare(options.wheels)
    if options.word == "build":
        install(options.wheels)
        build(len(os.sched_getaffinity(0)))
        return 0
    unknown = set(options.parts) - {planned.name for planned in ORDER}
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}")
    if not options.fake and (why := obstacle()):
        parser.error(why)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pdserve-gpu-") as folder:
        run = Run(options, Path(folder), started_s)
        all_parts(run, options.parts, options.wheels)
    print(json.dumps(run.result))
    found = {about["status"] for about in run.result["parts"].values()}
    return 1 if FAILED in found else 2 if found != {DONE} else 0


if __name__ == "__main__":
    sys.exit(main())
