"""An earlier commit of this repository, set up in a separate folder to be measured next to this
one."""

import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[1]


def build(commit: str) -> Path:
    """The folder, with an environment in .venv; the first `make setup` needs the network and a few
    minutes."""
    home = ROOT / "build/earlier" / commit
    if not (home / "Makefile").exists():
        packed = subprocess.run(
            ["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE
        ).stdout
        with tarfile.open(fileobj=BytesIO(packed)) as archive:
            archive.extractall(home, filter="data")
    subprocess.run(["make", "-C", home, "setup"], check=True, stdout=sys.stderr)
    return home
