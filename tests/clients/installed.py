"""Install pinned clients into folders below build/, once each."""

import fcntl
import hashlib
import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from clients.pins import Pin

FOLDER = Path(__file__).parents[2] / "build/test-clients"
LIMIT_S = 900


def installed(pin: Pin) -> Path:
    """Return the folder of commands (bin) of a pin; skip the test if it cannot be installed."""
    words = json.dumps([pin.registry, pin.packages, sys.version_info[:2]])
    name = re.sub(r"[^a-z0-9.]+", "-", pin.title.lower()).strip("-")
    folder = FOLDER / f"{name}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / ".installed"
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes run tests
        if not done.exists():
            install = {"npm": _npm, "pypi": _pip}[pin.registry]
            result = install(folder, pin.packages)
            if result.returncode:
                last = (result.stderr or result.stdout).strip().splitlines()[-1:]
                pytest.skip(f"{pin.title} cannot be installed: {' '.join(last)}")
            done.touch()
    return folder / ("node_modules/.bin" if pin.registry == "npm" else "bin")


def _npm(folder: Path, packages: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"{packages[0]} cannot be installed: there is no npm")
    (folder / "package.json").write_text('{"private": true}')
    return _run([npm, "install", "--save-exact", "--no-audit", "--no-fund", *packages], folder)


def _pip(folder: Path, packages: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python")]
    return _run([*pip, "install", "-q", "--disable-pip-version-check", *packages], folder)


def _run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
