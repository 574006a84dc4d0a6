"""The temporary folder of `up`: private, removed at the end, and swept after a kill."""

import fcntl
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.up.folders import PREFIX, run_dir


def test_the_folder_is_private_and_removed(tmp_path: Path) -> None:
    with run_dir(tmp_path) as folder:
        (folder / "a.sock").touch()
        assert folder.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_owner_is_swept_and_a_living_one_kept(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal\n"
        "from pdserve.cli.up.folders import run_dir\n"
        f"with run_dir(pathlib.Path({str(tmp_path)!r})):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(PREFIX)
    with run_dir(tmp_path) as first:
        assert not left.exists()
        with run_dir(tmp_path) as second:
            assert first.exists()
            assert second.exists()


def test_a_folder_swept_before_its_lock_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdtemp, flock = tempfile.mkdtemp, fcntl.flock
    made: list[Path] = []

    def make(**options: Any) -> str:
        made.append(Path(mkdtemp(**options)))
        if len(made) == 1:
            made[0].rmdir()
        return str(made[-1])

    def lock(fd: int, how: int) -> None:
        if len(made) == 2:
            made[1].rmdir()
        flock(fd, how)

    monkeypatch.setattr(tempfile, "mkdtemp", make)
    monkeypatch.setattr(fcntl, "flock", lock)
    with run_dir(tmp_path) as folder:
        assert len(made) == 3
        assert folder == made[2]
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []
