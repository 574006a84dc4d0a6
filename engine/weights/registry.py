"""Every storage format by name, found in this folder's modules, and how to read a tensor of it.

A family of formats is one module with a tuple FORMATS; nothing else lists them.
"""

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

import pdserve.engine.weights.formats as folder
from pdserve.engine.weights.format import Format, RawTensor

NATIVE = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
)
CHUNK_VALUES = 1 << 18  # smaller pieces are slower, larger ones only take memory


@functools.cache
def formats() -> Mapping[str, Format]:
    """The formats stored as blocks; those of plain numbers are NATIVE."""
    found: dict[str, Format] = {}
    for module in pkgutil.iter_modules(folder.__path__):
        loaded = importlib.import_module(f"{folder.__name__}.{module.name}")
        for item in getattr(loaded, "FORMATS", ()):
            assert item.name not in found, f"format {item.name} twice"
            found[item.name] = item
    return MappingProxyType(found)


def unpack(raw: RawTensor, dtype: torch.dtype) -> Tensor:
    """The values of `raw` in `dtype` and `raw.shape`.

    Blocks are expanded in float32 and rounded once. Plain numbers already in `dtype` are returned
    as they are, without a copy. Raises KeyError for a format that no module here has.
    """
    if raw.format in NATIVE:
        return raw.data.to(dtype)
    out = torch.empty(raw.shape, dtype=dtype, device=raw.data.device)
    unpack_into(raw, out)
    return out


def unpack_into(raw: RawTensor, out: Tensor) -> None:
    """Writes the values of `raw` into `out` of raw.shape, contiguous, rounding to its dtype."""
    assert tuple(out.shape) == raw.shape, (out.shape, raw.shape)
    if raw.format in NATIVE:
        out.copy_(raw.data)
        return
    kind = formats()[raw.format]
    blocks = raw.data.reshape(-1, kind.block_bytes)
    values = out.view(-1, kind.block_values)
    step = max(1, CHUNK_VALUES // kind.block_values)
    for start in range(0, len(blocks), step):
        values[start : start + step] = kind.unpack(blocks[start : start + step])
