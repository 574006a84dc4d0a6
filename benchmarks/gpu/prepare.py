"""Fetch what a machine with a GPU lacks, since it has no network: wheels for its Python, and the
stubs of the protos. Prints the MiB of the tree and of the wheels; their sum has a limit.

torch, Triton, CuPy and numpy are installed there.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from build import ROOT, STUBS

PYTHON, ABI = "3.12", "cp312"
NEWEST_GLIBC = 34  # 2.34
THERE = {"numpy", "torch", "triton"}
MORE = ("httpx", "psutil", "safetensors")  # packages of the parts
MOST_MIB = 60.0


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
    named = [*project["dependencies"], *project["optional-dependencies"]["worker"], *MORE]
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
