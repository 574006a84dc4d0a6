"""Tiny seeded encoders as sentence-transformers writes them, with a tokenizer of each kind."""

from pathlib import Path
from typing import Any

import torch
import transformers

from builders.encoder_tokenizers import encoder_tokenizer
from builders.tiny_embedder import write_modules, write_pooling

_COMMON: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 200,
}
_OWN: dict[str, dict[str, Any]] = {
    "bert": {"pad_token_id": 0},
    "xlm_roberta": {"pad_token_id": 1, "type_vocab_size": 1},
    # Windows of 5 tokens on each side, on the second and third layer.
    "modernbert": {"local_attention": 10, "pad_token_id": 0},
}
_CLASSES = {"bert": "Bert", "xlm_roberta": "XLMRoberta", "modernbert": "ModernBert"}
ENCODERS = tuple(_OWN)


def write_encoder(
    path: Path, arch: str, mode: str = "mean_tokens", head: str = "Model", **overrides: Any
) -> Path:
    """Write a tiny random encoder to the folder `path` and return it. `mode`: its pooling by
    sentence-transformers; empty: without their files. `head`: the end of its class's name."""
    config_class = getattr(transformers, f"{_CLASSES[arch]}Config")
    config = config_class(**{**_COMMON, **_OWN[arch], **overrides})
    model = getattr(transformers, f"{_CLASSES[arch]}{head}")(config)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in sorted(model.named_parameters()):
        scale = 0.3 if parameter.dim() == 1 else 1.2 * parameter.shape[-1] ** -0.5
        noise = torch.randn(parameter.shape, generator=generator) * scale
        parameter.data.copy_(noise + ("norm" in name.lower() and name.endswith("weight")))
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    encoder_tokenizer(arch).save(str(path / "tokenizer.json"))
    if mode:
        write_modules(path, "Normalize")
        write_pooling(path, mode)
    return path


def write_scorer(path: Path, arch: str, num_labels: int = 1, **overrides: Any) -> Path:
    """Write a tiny random encoder with a classification head."""
    head = "ForSequenceClassification"
    return write_encoder(path, arch, "", head, num_labels=num_labels, **overrides)
