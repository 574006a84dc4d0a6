"""Names what computed a KV cache, so that KV is never mixed across weights or numerics."""

import hashlib
import json

import torch

from pdserve.engine.checkpoints.card import CardData

KERNELS = "reference-2"  # raise it with any change of a kernel's results


def numerics_id(device: str, compute_dtype: str, kv_dtype: str, weights: str) -> str:
    """Kernel set and version, ISA class, compute and KV dtype, tensor-parallel size, expansion.

    Within one, the same inputs give the same floats as far as the kernels promise it.
    """
    isa = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else torch.backends.cpu.get_cpu_capability()
    )
    torch_version = torch.__version__.split("+")[0]
    parts = (
        f"{KERNELS}+torch-{torch_version}",
        device,
        isa,
        compute_dtype,
        kv_dtype,
        "tp1",
        weights,
    )
    return "/".join(part.replace(" ", "-") for part in parts)


def kv_identity(card: CardData, kv_dtype: str, numerics: str) -> bytes:
    """16 bytes: equal only if KV may be shared. An override that changes KV belongs here."""
    parts = [card.weights_digest, card.quantization, kv_dtype, numerics]
    return hashlib.sha256(json.dumps(["pdserve kv", *parts]).encode()).digest()[:16]
