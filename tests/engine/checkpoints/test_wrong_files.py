"""Loading a broken model ends with one message that names its path and the cause."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from builders.wrong_files import GOOD, WRONG_FILES, good_models

from pdserve.engine.api import EngineConfig
from pdserve.engine.checkpoints import CheckpointError
from pdserve.engine.load import load_model


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    good_models(folder)
    for name in GOOD:
        load_model(EngineConfig(model=str(folder / name)), lambda *_: None)
    return folder


def test_the_number_of_wrong_files_is_sufficient() -> None:
    assert len(WRONG_FILES) >= 140


def test_the_message_names_path_and_cause(
    subtests: pytest.Subtests, good: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for name in WRONG_FILES:
        with subtests.test(name):
            tmp_path = tmp_path_factory.mktemp("case")
            shutil.copytree(good, tmp_path / "copy")
            path = WRONG_FILES[name].make(tmp_path / "copy")
            with pytest.raises(CheckpointError, match=WRONG_FILES[name].cause) as caught:
                load_model(EngineConfig(model=str(path)), lambda *_: None)
            message = str(caught.value)
            assert str(path) in message
            assert "\n" not in message
            assert len(message) < 1500


@pytest.mark.parametrize(
    "name",
    [
        "mlx",
        "cut data",
        "gguf: architecture",
        "latent: dims without rope without end",
        "gpt-oss: a flat gate",
    ],
)
def test_a_worker_prints_the_message_and_exits(name: str, good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "copy")
    path = WRONG_FILES[name].make(tmp_path / "copy")
    done = subprocess.run(
        [sys.executable, "-m", "pdserve.cli.main", "decode", "--model", str(path),
         "--routers", "127.0.0.1:9"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PDSERVE_CLUSTER_SECRET": "x" * 32},
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("pdserve: ")]
    assert str(path) in line
    assert re.search(WRONG_FILES[name].cause, line)
    assert "Traceback" not in done.stderr
