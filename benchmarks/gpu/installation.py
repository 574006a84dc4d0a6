"""What a machine with a GPU and without network lacks: `prepare` fetches wheels for its Python and
the stubs of the protos elsewhere; `install` unpacks them there, and `build` builds `_native`.

torch, Triton, CuPy and numpy are installed there.
"""

import importlib.util
import os
import re
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
PYTHON, ABI = "3.12", "cp312"
NEWEST_GLIBC = 34  # 2.34
THERE = {"numpy", "torch", "triton"}
MORE = ("httpx", "psutil", "safetensors")  # packages of the parts
MOST_MIB = 60.0


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


def prepare(folder: Path) -> int:
    """Recreate the folder; returns the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    download(folder)
    copy_stubs(folder)
    tree, wheels = tree_mib(), sum(f.stat().st_size for f in folder.rglob("*.*")) / 2**20
    print(f"tree {tree:.1f} MiB, wheels {wheels:.1f} MiB, together {tree + wheels:.1f} MiB")
    if tree + wheels > MOST_MIB:
        print(f"that is more than {MOST_MIB:g} MiB", file=sys.stderr)
        return 1
    return 0


def wanted() -> list[str]:
    """The requirements for serving, from pyproject.toml, and those of the parts."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *MORE]
    return sorted({text.split("#")[0].replace(" ", "") for text in named})


def download(folder: Path) -> None:
    """Download wheels. Raises CalledProcessError if a package has no wheel for that Python."""
    platforms = [f"manylinux_2_{n}_x86_64" for n in range(5, NEWEST_GLIBC + 1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    words = ["download", "-q", "--disable-pip-version-check", "--only-binary=:all:"]
    words += ["--python-version", PYTHON, "--implementation", "cp", "-d", str(folder)]
    words += [w for abi in (ABI, "abi3", "none") for w in ("--abi", abi)]
    words += [w for platform in platforms for w in ("--platform", platform)]
    words += ["-c", str(ROOT / "constraints.txt"), *wanted()]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    for wheel in folder.glob("*.whl"):
        if re.split("[-_]", wheel.name.lower())[0] in THERE:
            wheel.unlink()


def copy_stubs(folder: Path) -> None:
    """Copy the stubs; grpcio-tools, which generates them, conflicts with the protobuf used for
    serving."""
    (folder / STUBS).mkdir(exist_ok=True)
    stubs = [*(ROOT / "protos").glob("*_pb2*.py*")]
    if not stubs:
        raise FileNotFoundError("protos/ has no stubs: run make setup first")
    for stub in stubs:
        shutil.copy(stub, folder / STUBS)


def tree_mib() -> float:
    """The size of files that git tracks, and of new files that it does not ignore."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    return sum(path.lstat().st_size for path in paths if path.exists()) / 2**20
