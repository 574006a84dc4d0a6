"""No code in a model's folder runs, whether or not the weights load."""

import json
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_models import write_tiny

from pdserve.engine.api import EngineConfig
from pdserve.engine.checkpoints import CheckpointError
from pdserve.engine.load import LoadedModel, load_model

AUTO_MAP = {
    "AutoConfig": "evil.EvilConfig",
    "AutoModelForCausalLM": "evil.EvilModel",
    "AutoTokenizer": ["evil.EvilTokenizer", None],
}


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Return the path of a file that exists once any code of the model has run."""
    return tmp_path / "ran"


@pytest.fixture
def folder(tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a model folder with code in every file that transformers and torch would run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_tiny(tmp_path / "model", "llama")
    code = f"open({str(marker)!r}, 'w').close()\nclass EvilConfig: pass\n"
    for name in ("evil", "modeling_llama", "configuration_llama", "sitecustomize", "__init__"):
        (path / f"{name}.py").write_text(code)
    for name in ("config.json", "tokenizer_config.json"):
        more: dict[str, Any] = {"auto_map": AUTO_MAP, "trust_remote_code": True}
        (path / name).write_text(json.dumps(json.loads((path / name).read_text()) | more))
    # A pickle that calls os.system when it is read.
    (path / "pytorch_model.bin").write_bytes(f"cos\nsystem\n(S'touch {marker}'\ntR.".encode())
    return path


def load(path: Path) -> LoadedModel:
    return load_model(EngineConfig(model=str(path)), lambda *_: None)


def test_code_next_to_weights_is_not_run(folder: Path, marker: Path) -> None:
    assert load(folder).card.architecture == "LlamaForCausalLM"
    assert not marker.exists()


def test_pickled_weights_are_refused_without_being_read(folder: Path, marker: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="found none"):
        load(folder)
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    with pytest.raises(CheckpointError):
        load(folder)
    assert not marker.exists()
