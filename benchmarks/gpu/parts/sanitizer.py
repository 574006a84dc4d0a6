"""compute-sanitizer over every kernel at small sizes: no access out of bounds, no race.

It watches the parts kernels and handoff with --smallest.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from part import MeasuredPart, run

TOOLS = ("memcheck", "racecheck")
WATCHED = ("kernels", "handoff")
FOUND = 77  # exit code
CLEAN = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards"}
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")


def measure(part: MeasuredPart) -> None:
    places = os.pathsep.join([os.environ.get("PATH", ""), *PLACES])
    program = shutil.which("compute-sanitizer", path=places)
    if not (part.fake or program):
        part.skip("compute-sanitizer", "it is not installed")
        return
    running = {}
    for tool in TOOLS[:1] if part.fake else TOOLS:
        watch = [program, "--tool", tool, "--error-exitcode", str(FOUND)] if program else []
        for watched in WATCHED:
            folder = part.folder / tool
            folder.mkdir(exist_ok=True)
            running[tool, watched] = start(part, [] if part.fake else watch, watched, folder)
    for (tool, watched), (process, folder) in running.items():
        code = finished(process, part.left_s - 5)
        record = folder / f"{watched}.json"
        log = (folder / f"{watched}.log").read_text(errors="replace")
        name = f"{tool} of {watched}"
        figures = json.loads(record.read_text())["figures"] if record.exists() else {}
        part.note(**{name: {"code": code, "figures": figures, "log": log[-600:]}})
        if code is None:
            part.fail(f"{name}: out of time")
        elif part.fake:
            part.skip(name, "a fake device has no compute-sanitizer")
        else:
            part.note(**{f"{name} is clean": CLEAN[tool] in log})


def start(
    part: MeasuredPart, watch: list[str], watched: str, folder: Path
) -> tuple["subprocess.Popen[bytes]", Path]:
    """Start a watched part; its output goes to a file next to its record."""
    script = str(Path(__file__).with_name(f"{watched}.py"))
    words = [*watch, sys.executable, script, "--smallest", "--folder", str(folder)]
    words += ["--watched", *(["--fake"] if part.fake else [])]
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with (folder / f"{watched}.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=env)
    return process, folder


def finished(process: "subprocess.Popen[bytes]", limit_s: float) -> int | None:
    """The exit code of a part; None if it had to be killed."""
    try:
        return process.wait(max(1.0, limit_s))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


if __name__ == "__main__":
    run(measure)
