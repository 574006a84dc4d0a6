"""The chat templates that llama.cpp is tested with, from the sdist of llama-cpp-python, which pip
fetches once into a cache."""

import subprocess
import sys
import tarfile
from pathlib import Path, PurePosixPath

import pytest

PACKAGE = "llama-cpp-python==0.3.36"
CACHE = Path.home() / ".cache" / "pdserve" / "llama-cpp-python"
FOLDER = "vendor/llama.cpp/models/templates"


def llama_cpp_templates() -> dict[str, str]:
    """Sources by name. Skips the test where the package can't be had."""
    with tarfile.open(_sdist()) as archive:
        found = {}
        for member in archive:
            path = PurePosixPath(member.name)
            if path.suffix == ".jinja" and str(path.parent).endswith(FOLDER):
                file = archive.extractfile(member)
                assert file is not None
                found[path.stem] = file.read().decode()
    return dict(sorted(found.items()))


def _sdist() -> Path:
    name, version = PACKAGE.split("==")
    path = CACHE / f"{name.replace('-', '_')}-{version}.tar.gz"
    if not path.exists():
        words = ["download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(CACHE), PACKAGE]
        done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
        if done.returncode or not path.exists():
            pytest.skip(
                f"TEMPLATES OF LLAMA.CPP WERE NOT TESTED: no {PACKAGE}: {done.stderr[-200:]}"
            )
    return path
