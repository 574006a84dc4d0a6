"""Unpacking by the gguf package, for formats too rare to be worth code of our own."""

import functools

import gguf
import torch
from torch import Tensor

from pdserve.engine.weights.format import Format


def unpack_by_gguf(kind: gguf.GGMLQuantizationType, blocks: Tensor) -> Tensor:
    """uint8 [blocks, bytes] -> float32 [blocks, values]; computes on the CPU."""
    values = gguf.quants.dequantize(blocks.cpu().numpy(), kind)
    return torch.from_numpy(values).to(blocks.device)


def gguf_format(name: str) -> Format:
    """The format of that GGUF type name, its sizes taken from the package's table."""
    kind = gguf.GGMLQuantizationType[name]
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    return Format(name, block_values, block_bytes, functools.partial(unpack_by_gguf, kind))
