"""The chat templates of llama.cpp's tests, and the source of its test of them, from the sdist of
llama-cpp-python, which pip fetches once into a cache.
"""

import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

PACKAGE = "llama-cpp-python==0.3.36"
CACHE = Path.home() / ".cache" / "pdserve" / "llama-cpp-python"
FOLDER = "vendor/llama.cpp/models/templates"
CHAT_TEST = "vendor/llama.cpp/tests/test-chat.cpp"


def llama_cpp_templates() -> dict[str, str]:
    """Return sources by name. Skips the test if the package is not available."""
    found = _files(lambda path: path.suffix == ".jinja" and str(path.parent).endswith(FOLDER))
    return {path.stem: text for path, text in sorted(found.items())}


def llama_cpp_chat_test() -> str:
    """Return the C++ source. Skips the test if the package is not available."""
    [source] = _files(lambda path: str(path).endswith(CHAT_TEST)).values()
    return source


def _files(wanted: Callable[[PurePosixPath], bool]) -> dict[PurePosixPath, str]:
    found = {}
    with tarfile.open(_sdist()) as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            if wanted(path):
                file = archive.extractfile(member)
                assert file is not None
                found[path] = file.read().decode()
    return found


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
