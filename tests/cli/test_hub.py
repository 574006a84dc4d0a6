"""`pull`, `ls` and `rm` over a hub on loopback and a cache of huggingface-hub."""

from pathlib import Path

import pytest
from fakes import hub as fake_hub

from pdserve.cli.main import main


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    for module in ("constants", "utils._cache_manager"):
        monkeypatch.setattr(f"huggingface_hub.{module}.HF_HUB_CACHE", str(cache))
    return cache


def test_a_model_is_pulled_listed_and_removed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "repo"
    folder.mkdir()
    for name, num_bytes in (("t-Q4_K_M.gguf", 2000), ("t-Q8_0.gguf", 10), ("config.json", 2)):
        (folder / name).write_bytes(b"x" * num_bytes)
    with fake_hub.serve({"org/t-GGUF": folder}) as (endpoint, _):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        assert main(["pull", "org/t-GGUF"]) == 0
        path = Path(capsys.readouterr().out.strip())
        assert path.is_relative_to(cache)
        assert path.name == "t-Q4_K_M.gguf"
        assert main(["pull", "org/none"]) == 1
        assert "org/none is not a local path and cannot be downloaded" in capsys.readouterr().err
    assert main(["list"]) == 0  # Ollama's name
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["model", "size", "changed"]
    assert lines[1][:2] == ["SmolLM2-135M-Instruct", "(default)"]
    assert lines[2][:3] == ["org/t-GGUF:t-Q4_K_M.gguf", "2", "KB"]
    assert len(lines) == 3

    for model, part in (
        ("org/t-GGUF:Q4_K_M", "`pdserve rm org/t-GGUF`"),
        ("org/other", "org/other is not in the cache"),
        (str(folder), "remove the file itself"),
        ("t", "no model 't'"),
    ):
        assert main(["rm", model]) == 1
        assert part in capsys.readouterr().err
    assert main(["rm", "hf.co/org/t-GGUF"]) == 0
    assert capsys.readouterr().out == "removed org/t-GGUF: 2 KB\n"
    assert not path.exists()


def in_cache(cache: Path, repo: str, *names: str) -> Path:
    """Add a repository with these files to the cache; return its folder. All have one revision."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("a" * 40)
    for name in names:
        file = folder / "snapshots" / ("a" * 40) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * 10)
    return folder


def test_a_repository_with_the_same_revision_stays(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    removed, kept = (in_cache(cache, repo, "t.gguf") for repo in ("org/z", "org/a"))
    assert main(["rm", "org/z"]) == 0
    assert kept.exists()
    assert not removed.exists()


def test_only_names_that_can_be_loaded_are_listed(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [f"Q8_0/t-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    in_cache(cache, "org/t", "t-Q4_0.gguf", *parts, "mmproj-F16.gguf", "u-00002-of-00002.gguf")
    in_cache(cache, "org/no-model", "config.json")
    in_cache(cache, "org/st", "model.safetensors")
    assert main(["ls"]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [
        ["org/st", "10", "B"],
        [f"org/t:{parts[0]}", "20", "B"],
        ["org/t:t-Q4_0.gguf", "10", "B"],
    ]


def test_without_a_cache(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["rm", "org/t"]) == 1
    assert "is not in the cache" in capsys.readouterr().err
