"""Names what computed a KV cache, so that KV is never mixed across weights or numerics."""

import hashlib
import json

import torch

from pdserve.engine.checkpoints.card import CardData

KERNELS = "reference-2"  # the torch kernels; raise it with any change of their results


def reference_numerics(device: torch.device, dtype: torch.dtype) -> str:
    """Of the torch kernels: set and version, ISA class, compute dtype."""
    isa = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else torch.backends.cpu.get_cpu_capability()
    )
    torch_version = torch.__version__.split("+")[0]
    name = str(dtype).removeprefix("torch.")
    return f"{KERNELS}+torch-{torch_version}/{device.type}/{isa.replace(' ', '-')}/{name}"


def numerics_id(kernels: str, kv_dtype: str, weights: str) -> str:
    """Kernels (with version, ISA class, compute dtype), KV dtype, tensor-parallel size, expansion.

    Within one, the same inputs give the same floats as far as the kernels promise it.
    """
    return f"{kernels}/{kv_dtype}/tp1/{weights}"


def kv_identity(card: CardData, kv_dtype: str, numerics: str) -> bytes:
    """16 bytes: equal only if KV may be shared. An override that changes KV belongs here."""
    parts = [card.weights_digest, card.quantization, kv_dtype, numerics]
    return hashlib.sha256(json.dumps(["pdserve kv", *parts]).encode()).digest()[:16]
