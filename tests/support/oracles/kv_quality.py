"""The cost of a dtype of keys and values: the distance of a model's next tokens from those with
float32 keys and values, on a given text.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from builders.paged_runner import PagedRunner
from builders.tiny_models import write_tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.engine.api import EngineConfig
from pdserve.engine.load import load_model

BLOCK, CHUNK = 32, 64


class KvQuality(NamedTuple):
    """The figures of one dtype compared with float32, over the positions of a text."""

    kl: float  # mean of KL(float32 || dtype), nats
    same_top: float  # share of positions with the same best token


def logits_of(model: Path, kv_dtype: str, ids: Sequence[int]) -> Tensor:
    """Return float32 [len(ids), vocab], on the native kernels with float32 weights: kernels of
    quantized weights round activations to 8 bits, where any difference, however small, changes
    some steps.
    """
    config = EngineConfig(model=str(model), kernels="native", weights="float32", kv_dtype=kv_dtype)
    decoder = load_model(config, lambda *_: None).decoder
    runner = PagedRunner(decoder, num_blocks=len(ids) // BLOCK + 2, block_size=BLOCK)
    parts = [runner.step({"x": ids[at : at + CHUNK]})["x"] for at in range(0, len(ids), CHUNK)]
    return torch.cat(parts)


def kv_quality(exact: Tensor, other: Tensor) -> KvQuality:
    """Return the figures of logits [positions, vocab]."""
    p, q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    return KvQuality(
        kl.mean().item(), (exact.argmax(-1) == other.argmax(-1)).double().mean().item()
    )


def write_biased(folder: Path, most: float = 200.0) -> Path:
    """Write a tiny Qwen 2 whose largest k bias is `most`, in those two dims of each head that rope
    turns least, as in Qwen 2.5.
    """
    write_tiny(folder, "qwen2", hidden_size=96, num_attention_heads=3, head_dim=32)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, bias in tensors.items():
        if name.endswith("k_proj.bias"):
            bias.view(-1, 32)[:, [15, 31]] = torch.tensor([most, -0.6 * most])
        if name.endswith("q_proj.bias"):
            bias.view(-1, 32)[:, [15, 31]] = torch.tensor([0.4, 0.5])
    save_file(tensors, file)
    return folder
