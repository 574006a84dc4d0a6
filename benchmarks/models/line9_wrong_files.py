"""Line 9: each of LEAST invalid models ends a worker with exit code 1 and one message with the
model's path and the cause, without a traceback."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from builders.wrong_files import WRONG_FILES, good_models

LEAST, PROCESSES = 80, 2
ENVIRONMENT = {**os.environ, "PDSERVE_CLUSTER_SECRET": "x" * 32}


def fault(name: str, good: Path, folder: Path) -> str:
    """The fault in how a worker ends; empty if there is none."""
    shutil.copytree(good, folder)
    path = WRONG_FILES[name].make(folder)
    command = ["-m", "pdserve.services.cli.main", "decode", "--model", str(path)]
    done = subprocess.run(
        [sys.executable, *command, "--routers", "127.0.0.1:9"],
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("pdserve: ")]
    if done.returncode != 1 or "Traceback" in done.stderr:
        return f"exit code {done.returncode}: {done.stderr[-500:]}"
    if len(lines) != 1 or str(path) not in lines[0]:
        return f"messages: {lines}"
    return "" if re.search(WRONG_FILES[name].cause, lines[0]) else f"not the cause: {lines[0]}"


def main() -> None:
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(PROCESSES) as pool:
        folder = Path(name)
        (folder / "good").mkdir()
        good_models(folder / "good")
        faults = pool.map(
            lambda one: fault(one[1], folder / "good", folder / str(one[0])), enumerate(WRONG_FILES)
        )
        found = {name: what for name, what in zip(WRONG_FILES, faults, strict=True) if what}
    ok = not found and len(WRONG_FILES) >= LEAST
    print(json.dumps({"ok": ok, "models": len(WRONG_FILES), "faults": found}))


if __name__ == "__main__":
    main()
