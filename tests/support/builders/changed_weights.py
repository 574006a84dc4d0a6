"""The shipped model with a few weights changed, as further training would change them."""

import shutil
from pathlib import Path

from gguf import GGUFReader

from builders.tiny_models import shipped_model


def write_changed(target: Path) -> Path:
    """Write a model with the same tokenizer, template and shapes but other answers."""
    shutil.copyfile(shipped_model(), target)
    for tensor in GGUFReader(target, "r+").tensors:
        if tensor.name.endswith("attn_norm.weight"):
            tensor.data[:] *= 1.02  # float32
    return target
