"""Make the tree importable on a machine without network: unpack the wheels, build `_native`."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build/gpu-site"
CMAKE = ROOT / "build/gpu-native"
PATHS = (".src", "benchmarks/gpu", "benchmarks/gpu/parts", "tests/support")
STUBS = "protos"  # folder next to the wheels


def environment(fake: bool = False) -> dict[str, str]:
    """The environment of every process that imports the tree, without the ARGS of an enclosing
    `make`. On the fake device Triton interprets kernels, which it decides when a kernel's module is
    imported."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    own.pop("ARGS", None)
    places = [*(str(ROOT / path) for path in PATHS), str(SITE)]
    own |= {"PYTHONPATH": os.pathsep.join(places), "PYTHONUNBUFFERED": "1"}
    return own | {"TRITON_INTERPRET": "1"} if fake else own


def install(wheels: Path) -> None:
    """Install the packages that this Python lacks, if the wheels are there, and the stubs of the
    protos. Raises CalledProcessError."""
    found = sorted(wheels.glob("*.whl"))
    lacks = any(importlib.util.find_spec(name) is None for name in ("grpc", "fastapi"))
    if lacks and found and not SITE.exists():
        words = ("install", "-q", "--no-index", "--no-deps", "--no-compile")
        # another process that imports finds either all or nothing
        beside = SITE.with_suffix(".new")
        shutil.rmtree(beside, ignore_errors=True)
        _run(sys.executable, "-m", "pip", *words, "--target", beside, *found)
        _write_metadata(beside)
        beside.rename(SITE)
    for stub in (wheels / STUBS).glob("*"):
        if not (ROOT / "protos" / stub.name).exists():
            shutil.copy(stub, ROOT / "protos")


def _write_metadata(site: Path) -> None:
    """Write the metadata from which pdserve, which is not installed, reads its version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / "METADATA").write_text(about)


def build(jobs: int) -> None:
    """Build pdserve.kernels._native from the present sources, unless it was installed in another
    way. Raises CalledProcessError."""
    trial = [sys.executable, "-c", "from pdserve.kernels._native import copy_and_hash"]
    done = subprocess.run(trial, env=environment(), cwd=ROOT, capture_output=True)
    if not done.returncode and not CMAKE.exists():
        return
    _run("cmake", "-S", ROOT, "-B", CMAKE, f"-DPython_EXECUTABLE={sys.executable}")
    _run("cmake", "--build", CMAKE, "--target", "_native", "-j", jobs)
    for module in (CMAKE / "kernels/native").glob("_native*.so"):
        shutil.copy(module, ROOT / "kernels")


def _run(*words: Any) -> None:
    subprocess.run(list(map(str, words)), check=True, stdout=sys.stderr, env=environment())
