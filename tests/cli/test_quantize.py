"""`pdserve quantize` on tiny files."""

from pathlib import Path

import pytest
from builders.tiny_models import write_tiny
from builders.write_gguf import write_gguf

from pdserve.cli.main import main


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96}
    return write_gguf(write_tiny(tmp_path / "tiny", "qwen3", **sizes), tmp_path / "plain.gguf")


def test_a_file_is_written_and_described(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = plain.with_name("out.gguf")
    assert main(["quantize", str(plain), str(out), "--type", "Q4"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{out}: ")
    assert "22 Q4_0, 13 F32, 1 Q8_0" in said.out
    assert "out.gguf: quantizing 100%" in said.err
    assert main(["quantize", str(plain), str(out)]) == 1
    assert f"already exists: '{out}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "out", "words", "code", "says"),
    [
        ("plain.gguf", "out.gguf", ["--type", "q9"], 2, "'q9' is not supported; supported: q4_0"),
        ("plain.gguf", "none/out.gguf", [], 1, "No such file or directory"),
        ("missing.gguf", "out.gguf", [], 1, "no model '"),
        ("tiny", "out.gguf", [], 1, "convert_hf_to_gguf.py, or serve it with --isq q4k"),
        ("tiny/config.json", "out.gguf", [], 1, "is not a GGUF file"),
    ],
)
def test_impossible_conversions_are_refused(
    plain: Path,
    capsys: pytest.CaptureFixture[str],
    model: str,
    out: str,
    words: list[str],
    code: int,
    says: str,
) -> None:
    folder = plain.parent
    before = sorted(folder.iterdir())
    assert main(["quantize", str(folder / model), str(folder / out), *words]) == code
    error = capsys.readouterr().err
    assert error.startswith("pdserve quantize: ")
    assert says in error
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("model", "out", "says"),
    [
        (
            "org/name",
            "out.gguf",
            "org/name is a repository: specify one of its GGUF files, as in org/name:",
        ),
        ("org/name@main", "out.gguf", "org/name is a repository"),
        ("org/name:file.gguf", "plain.gguf", "already exists"),
        ("org/name", "plain.gguf", "already exists"),
    ],
)
def test_nothing_is_downloaded_for_an_impossible_conversion(
    plain: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
    out: str,
    says: str,
) -> None:
    requests = []
    download = "pdserve.engine.checkpoints.resolve.download"
    monkeypatch.setattr(download, lambda *to: requests.append(to))
    assert main(["quantize", model, str(plain.with_name(out))]) == 1
    assert says in capsys.readouterr().err
    assert not requests
