"""`pull`, `ls` and `rm` over a hub on loopback and a cache of huggingface-hub."""

from pathlib import Path

import pytest
from fakes import hub as fake_hub

from pdserve.cli.main import main


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
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
    assert lines[1][:4] == ["SmolLM2-135M-Instruct", "(ships", "with", "pdserve)"]
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


def test_without_a_cache(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["rm", "org/t"]) == 1
    assert "is not in the cache" in capsys.readouterr().err
