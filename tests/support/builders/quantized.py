"""Writes a model of plain weights as quantized checkpoints, in the layouts of their tools.

Independent of the readers under test: GPTQ and AWQ are packed integer by integer as AutoGPTQ and
AutoAWQ do, 8-bit floats are torch's, everything else is done by compressed-tensors.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    MXFP4PackedCompressor,
    NVFP4PackedCompressor,
    PackedQuantizationCompressor,
    unpack_fp4_from_uint8,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Parts = dict[str, Tensor]
QUANTIZED = ("_proj.weight", "_proj_with_mqa.weight")  # endings of its matrices' names
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
COMPRESSORS = {
    "pack-quantized": PackedQuantizationCompressor,
    "int-quantized": IntQuantizationCompressor,
    "float-quantized": FloatQuantizationCompressor,
    "nvfp4-pack-quantized": NVFP4PackedCompressor,
    "mxfp4-pack-quantized": MXFP4PackedCompressor,
}


class Quantized(NamedTuple):
    """One way to quantize: the entry in config.json, and a weight's stored parts and values."""

    config: dict[str, Any]
    quantize: Callable[[Tensor], tuple[Parts, Tensor]]


def write_quantized(source: Path, stored: Path, rounded: Path, how: Quantized) -> None:
    """Write model `source` with its projections quantized to the folder `stored`, and with their
    resulting values, in float32, to `rounded`.
    """
    parts: Parts = {}
    values: Parts = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith(QUANTIZED):
            made, values[name] = how.quantize(tensor)
            prefix = name.removesuffix("weight")
            parts |= {prefix + part: array.contiguous() for part, array in made.items()}
        else:
            parts[name] = values[name] = tensor
    config = json.loads((source / "config.json").read_text())
    added: dict[str, Any] = {"quantization_config": how.config}
    _write(source, config | added, parts, stored)
    _write(source, config, values, rounded)


def _write(source: Path, config: dict[str, Any], tensors: Parts, folder: Path) -> None:
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def gptq(
    bits: int,
    group: int,
    *,
    symmetric: bool = False,
    ordered: bool = False,
    v2: bool = False,
) -> Quantized:
    """Return GPTQ quantization. `ordered`: inputs are grouped in another order (desc_act)."""
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": ordered,
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        inputs = weight.shape[1]
        size = inputs if group == -1 else group
        # The weights of a layer over one input share an order, as GPTQ derives it from the input.
        order = torch.Generator().manual_seed(inputs)
        group_of = torch.arange(inputs) // size
        if ordered:
            group_of = group_of[torch.randperm(inputs, generator=order)]
        levels, scales, zeros = _integers(weight, group_of, bits, symmetric)
        parts = {
            "qweight": pack_down(levels.T.numpy(), bits),
            "qzeros": pack_down(((zeros - int(not v2)) % (1 << bits)).numpy(), bits).T,
            "scales": scales.T.half(),
            "g_idx": group_of.int(),
        }
        values = (levels - zeros[:, group_of]) * scales.half().float()[:, group_of]
        return parts, values.float()

    return Quantized(config, quantize)


def awq(group: int) -> Quantized:
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        size = weight.shape[1] if group == -1 else group
        group_of = torch.arange(weight.shape[1]) // size
        levels, scales, zeros = _integers(weight, group_of, 4, symmetric=False)
        parts = {
            "qweight": pack_across(levels.T.numpy()),
            "qzeros": pack_across(zeros.T.numpy()),
            "scales": scales.T.half(),
        }
        return parts, ((levels - zeros[:, group_of]) * scales.half().float()[:, group_of]).float()

    return Quantized(config, quantize)


def fp8(of: str) -> Quantized:
    """Return fp8 quantization with a scale for the "tensor", for each "output", or for each
    "block" of 128 x 128.
    """
    config: dict[str, Any] = {"quant_method": "fbgemm_fp8" if of == "output" else "fp8"}
    if of == "block":
        config |= {"weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        rows, cols = weight.shape
        if of == "block":
            blocks = [
                [part.abs().max() / 448 for part in row.split(128, 1)] for row in weight.split(128)
            ]
            scale = torch.tensor(blocks)
            spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
        elif of == "output":
            scale = spread = weight.abs().amax(1, keepdim=True) / 448
        else:
            scale = spread = weight.abs().max() / 448
        stored = (weight / spread).to(torch.float8_e4m3fn)
        name = "weight_scale_inv" if of == "block" else "weight_scale"
        parts = {"weight": stored, name: scale}
        if of == "tensor":
            parts["input_scale"] = torch.tensor(0.5)
        return parts, stored.float() * spread

    return Quantized(config, quantize)


def compressed(format: str, ordered: bool = False, **weights: Any) -> Quantized:
    """Return compressed-tensors' `format`; `weights` are its arguments for the weights. `ordered`:
    inputs are grouped in another order, as its earlier versions stored it.
    """
    args = QuantizationArgs(**weights)
    activations = QuantizationArgs(num_bits=args.num_bits, type=args.type, dynamic=True)
    scheme = QuantizationScheme(
        format=format,
        targets=["Linear"],
        weights=args,
        input_activations=None if format == "pack-quantized" else activations,
    )
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        state = {"weight": weight, **_scales(weight, args)}
        if ordered:
            groups = torch.arange(weight.shape[1]) // (args.group_size or 1)
            order = torch.Generator().manual_seed(weight.shape[1])
            group_of = groups[torch.randperm(weight.shape[1], generator=order)]
            by_group = torch.argsort(group_of, stable=True)
            state["weight"] = weight[:, by_group]
        compressor = COMPRESSORS[format]
        parts = dict(compressor.compress(state, scheme))
        values = _decompressed(parts, scheme)
        if args.type == "int":  # as most files have them
            parts["weight_scale"] = parts["weight_scale"].bfloat16()
        if ordered:  # the file has the inputs' own order
            undone = torch.argsort(by_group)
            values = values[:, undone]
            levels = _unpack_across(parts["weight_packed"], args.num_bits)[:, undone]
            parts["weight_packed"] = pack_down(levels.T.numpy(), args.num_bits).T
            parts["weight_g_idx"] = group_of.int()
        return parts, values

    return Quantized(config, quantize)


def write_mxfp4_experts(source: Path, stored: Path, rounded: Path) -> None:
    """Write a gpt-oss model with its experts in the form of its releases to the folder `stored`,
    and with the values that transformers reads from them, in float32, to `rounded`.
    """
    tensors: Parts = {}
    values: Parts = {}
    generator = torch.Generator().manual_seed(4)
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj") or ".experts." not in name:
            tensors[name] = values[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32, 16)
        blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, shape[:3], generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        assert values[name].shape == tensor.shape
    unconverted = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    how = {"quant_method": "mxfp4", "modules_to_not_convert": unconverted}
    config = json.loads((source / "config.json").read_text())
    _write(source, config | {"quantization_config": how}, tensors, stored)
    _write(source, config, values, rounded)


def _decompressed(parts: Parts, scheme: QuantizationScheme) -> Tensor:
    """Decompress in float32 throughout: the library rounds 4-bit floats to bfloat16."""
    if "weight_global_scale" not in parts:
        return COMPRESSORS[scheme.format].decompress(dict(parts), scheme)["weight"].float()
    packed = parts["weight_packed"]
    levels = unpack_fp4_from_uint8(packed, len(packed), 2 * packed.shape[1], torch.float32)
    whole = parts["weight_global_scale"]
    return dequantize(
        levels, parts["weight_scale"].float(), args=scheme.weights, global_scale=whole
    )


def pack_down(levels: Any, bits: int) -> Tensor:
    """Pack integers [n, m] -> int32 [n * bits / 32, m]: as many as fit in a word, the first
    lowest.
    """
    per_word = 32 // bits
    packed = np.zeros((len(levels) // per_word, levels.shape[1]), np.uint32)
    for number, row in enumerate(levels):
        packed[number // per_word] |= row.astype(np.uint32) << np.uint32(bits * (number % per_word))
    return torch.from_numpy(packed.view(np.int32))


def pack_across(levels: Any) -> Tensor:
    """Pack integers of 4 bits [n, m] -> int32 [n, m / 8] in AWQ's order."""
    packed = np.zeros((len(levels), levels.shape[1] // 8), np.uint32)
    for word in range(packed.shape[1]):
        for number, column in enumerate(AWQ_ORDER):
            packed[:, word] |= levels[:, 8 * word + column].astype(np.uint32) << np.uint32(
                4 * number
            )
    return torch.from_numpy(packed.view(np.int32))


def _unpack_across(packed: Tensor, bits: int) -> Tensor:
    words = packed.numpy().view(np.uint32)[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)
    return torch.from_numpy((words & ((1 << bits) - 1)).reshape(len(packed), -1).astype(np.int64))


def _integers(
    weight: Tensor, group_of: Tensor, bits: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (levels [outputs, inputs], scales and zeros [outputs, groups]); scales fit float16."""
    top = (1 << bits) - 1
    groups = [weight[:, group_of == g] for g in range(int(group_of.max()) + 1)]
    if symmetric:
        scales = torch.stack([part.abs().amax(1) / (top // 2) for part in groups], 1)
        zeros = torch.full_like(scales, (top + 1) // 2)
    else:
        low = torch.stack([part.amin(1).clamp(max=0) for part in groups], 1)
        high = torch.stack([part.amax(1).clamp(min=0) for part in groups], 1)
        scales = (high - low) / top
        zeros = (-low / scales).round().clamp(0, top)
    scales = scales.half().float()
    levels = (weight / scales[:, group_of] + zeros[:, group_of]).round().clamp(0, top)
    return levels.long(), scales, zeros.long()


def _scales(weight: Tensor, args: QuantizationArgs) -> Mapping[str, Tensor]:
    rows, cols = weight.shape
    strategy = str(getattr(args.strategy, "value", args.strategy))
    if strategy == "block":
        blocks = [[b.abs().max() for b in row.split(128, 1)] for row in weight.split(128)]
        largest = torch.tensor(blocks)
    elif strategy == "tensor":
        largest = weight.abs().max().reshape(1)
    else:
        size = cols if strategy == "channel" else args.group_size
        largest = weight.reshape(rows, -1, size).abs().amax(2)
    if str(getattr(args.type, "value", args.type)) == "float":
        if args.num_bits == 8:
            return {"weight_scale": largest / 448}
        if strategy == "tensor_group":
            whole = 448 * 6 / weight.abs().max()
            scale = (largest / 6 * whole).to(torch.float8_e4m3fn).float()
            return {"weight_scale": scale, "weight_global_scale": whole.reshape(1)}
        return {"weight_scale": 2.0 ** torch.floor(torch.log2(largest / 4))}
    half = 1 << args.num_bits >> 1
    scale = (largest / (half - 1)).bfloat16().float()
    if args.symmetric:
        return {"weight_scale": scale}
    zeros = torch.arange(scale.numel()).reshape(scale.shape) % 5 - 2
    return {"weight_scale": scale, "weight_zero_point": zeros.to(torch.int8)}
