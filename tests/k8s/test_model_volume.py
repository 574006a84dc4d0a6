"""The script of model-volume: a worker opens, without the hub, what a Job has fetched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders.manifests import SOURCES
from fakes import hub as fake_hub

SCRIPT = SOURCES / "components/model-volume/pool/model_volume.py"
MODEL = f"org/tiny@{fake_hub.COMMIT}"
OPENS = f"""from pdserve.engine.checkpoints.resolve import resolve
print(resolve("{MODEL}", print))"""


def state(folder: Path) -> dict[Path, int]:
    """Return every path in the folder with its modification time; a folder's time changes with its
    entries."""
    return {path: path.lstat().st_mtime_ns for path in (folder, *folder.rglob("*"))}


def command(what: str, cache: Path, **env: str) -> "subprocess.Popen[bytes]":
    variables = {"PDSERVE_MODEL": MODEL, "HF_HUB_CACHE": str(cache), **env}
    return subprocess.Popen([sys.executable, str(SCRIPT), what], env={**os.environ, **variables})


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_a_worker_opens_what_the_job_fetched(tmp_path: Path, repo: Path) -> None:
    """The worker waits until the model is complete and then reads it from a read-only volume."""
    cache = tmp_path / "models"
    cache.mkdir()
    waiting = command("wait", cache)
    with fake_hub.serve({"org/tiny": repo}) as (endpoint, hub):
        assert command("fetch", cache, HF_ENDPOINT=endpoint).wait(60) == 0
        assert waiting.wait(60) == 0
        before = len(hub.requests)
        assert command("fetch", cache, HF_ENDPOINT=endpoint).wait(60) == 0
        assert hub.fetched() == {"config.json", "model.safetensors"}
        assert hub.requests[before:] == [], "a complete model was fetched again"
    before_reading = state(cache)
    env = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": endpoint}
    done = subprocess.run([sys.executable, "-c", OPENS], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "name='org/tiny'" in done.stdout
    assert state(cache) == before_reading, "the worker changed the volume, which is read-only"


def test_an_incomplete_model_is_not_used(tmp_path: Path, repo: Path) -> None:
    cache = tmp_path / "models"
    cache.mkdir()
    with fake_hub.serve({"org/other": repo}) as (endpoint, hub):
        assert command("fetch", cache, HF_ENDPOINT=endpoint).wait(60) != 0
        assert hub.requests, "the hub received no request"
    assert not list(cache.glob("*.complete"))
    waiting = command("wait", cache)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(3)
    finally:
        waiting.kill()
        waiting.wait()


@pytest.mark.parametrize("model", ["org/tiny", "org/tiny@main", "org/tiny@0123456:x.gguf"])
def test_a_model_without_its_commit_is_refused(tmp_path: Path, repo: Path, model: str) -> None:
    with fake_hub.serve({"org/tiny": repo}) as (endpoint, hub):
        failed = subprocess.run(
            [sys.executable, str(SCRIPT), "fetch"],
            env={
                **os.environ,
                "PDSERVE_MODEL": model,
                "HF_HUB_CACHE": str(tmp_path),
                "HF_ENDPOINT": endpoint,
            },
            capture_output=True,
            text=True,
        )
    assert failed.returncode == 1
    assert "40 digits" in failed.stderr
    assert not hub.requests
