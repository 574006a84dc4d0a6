"""The last release, checked out of git and built next to this tree.

tests/releases.json names the commit of each release and the version of its protocol; a git tag with
the release's name has priority.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from dataclasses import dataclass
from pathlib import Path

from pdserve.services.common.metrics import COMMIT_FILE

ROOT = Path(__file__).parents[3]
NAMED = ROOT / "tests/releases.json"
BUILT = "built"


class NoRelease(Exception):
    """The last release is not in this clone."""


class BuildFailed(Exception):
    """The last release cannot be built here."""


@dataclass(frozen=True)
class Release:
    """A release that is tagged, or named in releases.json."""

    name: str
    commit: str
    protocol: int


def last_release() -> Release:
    """The last release. Raises NoRelease if its commit is not in this clone, as in a shallow
    one."""
    name, about = list(json.loads(NAMED.read_text()).items())[-1]
    for revision in (f"refs/tags/v{name}", f"refs/tags/{name}", about["commit"]):
        found = _git("rev-parse", "--quiet", "--verify", f"{revision}^{{commit}}")
        if found.returncode == 0:
            return Release(name, found.stdout.strip(), about["protocol"])
    raise NoRelease(f"commit {about['commit'][:12]} of {name} is not in this clone: git fetch it")


def python_of(release: Release) -> str:
    """An interpreter that has the release as pdserve, and its dependencies from this environment.
    The first call compiles its kernels, for minutes. Raises BuildFailed."""
    folder = ROOT / "build" / "releases" / f"{release.name}-{release.commit[:12]}"
    python = folder / "venv" / "bin" / "python"
    if not (folder / BUILT).exists():
        shutil.rmtree(folder, ignore_errors=True)
        try:
            _build(release, folder, python)
        except subprocess.CalledProcessError as error:
            raise BuildFailed(f"{release.name}: {error.stderr[-2000:]}") from error
        (folder / BUILT).touch()
    return str(python)


def _build(release: Release, folder: Path, python: Path) -> None:
    source, wheels = folder / "source", folder / "wheels"
    source.mkdir(parents=True)
    archive = folder / "source.tar"
    _run("git", "-C", str(ROOT), "archive", "-o", str(archive), release.commit)
    with tarfile.open(archive) as packed:
        packed.extractall(source, filter="data")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    _run(*pip, "wheel", "--no-deps", "-w", str(wheels), str(source))
    (wheel,) = wheels.iterdir()
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # Its packages have priority; the finder of this tree's editable pdserve is left out.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    _run(*pip, "install", "--no-deps", "--target", str(site), str(wheel))
    # As the build of an image records it; both releases may have one version.
    (site / "pdserve" / COMMIT_FILE).write_text(release.commit)
    where = _run(str(python), "-P", "-c", "import pdserve; print(pdserve.__file__)")
    if not Path(where.strip()).is_relative_to(site):
        raise BuildFailed(f"pdserve of {release.name} is found at {where.strip()}")


def _git(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)


def _run(*words: str) -> str:
    """Run a command. Raises CalledProcessError."""
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
    return done.stdout
