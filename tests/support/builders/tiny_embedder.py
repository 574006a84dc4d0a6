"""Tiny embedding models as sentence-transformers writes them, and their vectors by transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors

from builders.byte_tokenizer import EOS
from builders.tiny_models import write_tiny

MODES = ("cls_token", "mean_tokens", "max_tokens", "weightedmean_tokens", "lasttoken")


def write_embedder(
    path: Path,
    arch: str = "qwen3",
    mode: str = "lasttoken",
    *,
    normalizes: bool = True,
    headless: bool = True,
    **overrides: Any,
) -> Path:
    """Write a tiny model whose files specify its pooling; its tokenizer ends a text with eos.
    `headless`: it is stored as the class without a head, whose names have no prefix.
    """
    write_tiny(path, arch, **overrides)
    config = json.loads((path / "config.json").read_text())
    if headless:
        file = path / "model.safetensors"
        tensors = {
            name.removeprefix("model."): tensor.clone()
            for name, tensor in load_file(file).items()
            if not name.startswith("lm_head")
        }
        save_file(tensors, file, metadata={"format": "pt"})
        names = [name.replace("ForCausalLM", "Model") for name in config["architectures"]]
        (path / "config.json").write_text(json.dumps(config | {"architectures": names}))
    write_modules(path, *(["Normalize"] if normalizes else []))
    write_pooling(path, mode)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, 258)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def write_modules(path: Path, *further: str) -> None:
    """Write modules.json: the model, its pooling and further modules."""
    kinds = ("Transformer", "Pooling", *further)
    modules = [
        {
            "idx": n,
            "name": str(n),
            "path": f"{n}_{kind}" if n else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for n, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))


def write_pooling(path: Path, *modes: str) -> None:
    """Write 1_Pooling/config.json with these modes set."""
    (path / "1_Pooling").mkdir(exist_ok=True)
    flags = {f"pooling_mode_{mode}": mode in modes for mode in MODES}
    config = {"word_embedding_dimension": 48, **flags, "include_prompt": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(config))


class Oracle:
    """Computes vectors of token ids with transformers."""

    def __init__(self, path: Path, pooling: str) -> None:
        self._pooling = pooling
        self._model = transformers.AutoModel.from_pretrained(path, attn_implementation="eager")

        self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a single text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @torch.inference_mode()
    def pooled(self, ids: Sequence[int]) -> torch.Tensor:
        """Return float32 [hidden], not normalized."""
        states = self._model(torch.tensor([list(ids)])).last_hidden_state[0]
        if self._pooling == "mean":
            return states.mean(dim=0)
        return states[0 if self._pooling == "cls" else -1]

    def embedding(self, ids: Sequence[int]) -> torch.Tensor:
        """Return float32 [hidden] of length 1."""
        return torch.nn.functional.normalize(self.pooled(ids), dim=0)
