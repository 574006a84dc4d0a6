"""Launches that together compile each kernel of kernels/cuda in each of its variants.

Each function returns labels and calls that launch kernels with tensors on the CPU.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from builders.attention_rows import plan_rows
from compile_only import MOST_SHARED
from triton.runtime import driver

from pdserve.kernels.cuda.attention import paged_attention
from pdserve.kernels.cuda.experts import (
    Groups,
    MatrixStack,
    choose,
    combine,
    group,
    grouped_product,
    tile_width,
    tiles_of_group,
)
from pdserve.kernels.cuda.layer import (
    HeadNorms,
    HeadRange,
    Rotation,
    activated,
    add,
    add_norm,
    gated,
    norm,
    prepare_heads,
    xielu,
)
from pdserve.kernels.cuda.linear import (
    DeviceMatrix,
    ProductTarget,
    SplitSums,
    pack,
    tall_tiles,
    tiles_of_width,
    width_of,
)
from pdserve.kernels.cuda.linear import product as linear
from pdserve.kernels.cuda.sampling import CudaSampling
from pdserve.kernels.cuda.sampling.logprobs import launch as launch_logprobs
from pdserve.kernels.sampling_ops import StreamSettings

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HEADS = ((64, 0), (80, 0), (96, 0), (128, 0), (192, 0), (256, 0), (576, 512))  # length and latent


def attention() -> list[tuple[str, Callable[[], object]]]:
    """Decode rows of one split, then of more splits next to a chunk. Variants that spill registers
    are omitted: values of 512, and latent float16 under bfloat16."""
    cases = [(BF16, BF16, head_dim, latent, 2, False) for head_dim, latent in HEADS]
    cases += [(BF16, BF16, 576, 512, 128, False), (BF16, BF16, 64, 0, 64, False)]  # wide groups
    # as in Gemma and gpt-oss
    cases += [(BF16, BF16, 256, 0, 2, True), (BF16, BF16, 64, 0, 8, True)]
    cases += [(BF16, F16, 128, 0, 2, False), (BF16, F32, 128, 0, 2, False)]
    cases += [(BF16, F16, 256, 0, 2, False)]
    cases += [(F16, F16, 128, 0, 2, False), (F16, BF16, 128, 0, 2, False)]
    cases += [(F32, F32, head_dim, latent, 2, True) for head_dim, latent in HEADS]
    cases += [(F32, BF16, 128, 0, 2, False)]
    return [(_attention_label(*case), partial(_attend, *case)) for case in cases]


def _attention_label(
    dtype: torch.dtype, kv: torch.dtype, head_dim: int, latent: int, group: int, capped: bool
) -> str:
    names = f"{dtype} over {kv}".replace("torch.", "")
    rest = f"latent {latent}, " * bool(latent) + f"groups of {group}" + ", capped, sinks" * capped
    return f"attention, {names}, heads of {head_dim}, {rest}"


def _attend(
    dtype: torch.dtype, kv: torch.dtype, head_dim: int, latent: int, group: int, capped: bool
) -> None:
    pool = torch.zeros(2, 1 if latent else 2, 1 if latent else 2, 16, head_dim, dtype=kv)
    num_heads = pool.shape[2] * group
    for lens in ((1, 1), (2000, 100)):
        rows = plan_rows((0, 1, 1 + lens[1]), (lens[0], lens[1]), 1, torch.zeros(2, 125).int())
        q = torch.zeros(1 + lens[1], num_heads, head_dim, dtype=dtype)
        sinks = torch.zeros(num_heads) if capped else None
        cap = 50.0 if capped else 0.0
        paged_attention(q, pool, rows, 0.1, soft_cap=cap, sinks=sinks, latent=latent)


ROWS, COLS = 256, 1024
# Tokens, maximum tokens of a tile, and whether one program adds all splits of its tile.
EVERY = (
    *((n, n, looped) for n in (16, 32, 64) for looped in (False, True)),
    (256, 64, True),
    (256, 128, False),
    (256, 128, True),
)
ENDS = (EVERY[0], (256, 64, True), EVERY[-1])  # the fewest and the most registers

# Format, columns of a group, type of scales, whether there are zeros.
PLAIN = ("BF16", 0, np.uint16, False)
Q4_K = ("Q4_K", 0, np.uint8, False)
Q8_0 = ("Q8_0", 0, np.uint8, False)
GPTQ = ("INT4", 128, np.float16, True)
EXACT_INT4 = ("INT4", 32, np.float32, True)
INT4_PAIRS = ("INT4", 32, np.float16, False)
INT8_16 = ("INT8", 16, np.float32, False)
INT8_ROWS = ("INT8", COLS, np.float16, True)
FP8 = ("FP8", 128, np.float32, False)
FP8_ROWS = ("FP8", COLS, np.uint16, False)

LAUNCHED = (
    (torch.bfloat16, (PLAIN, Q4_K, GPTQ), EVERY),
    (torch.bfloat16, (Q8_0, EXACT_INT4, INT4_PAIRS, INT8_16, INT8_ROWS, FP8, FP8_ROWS), ENDS),
    (torch.float16, (PLAIN, Q4_K, GPTQ, INT8_16), ENDS),
    (torch.float32, (PLAIN, Q4_K, Q8_0), ENDS),
)


def matrix(
    format: str, group: int, scales: type[np.generic], zeros: bool, dtype: torch.dtype
) -> DeviceMatrix:
    """A weight matrix of zeros."""
    if format == "BF16":
        parts = {"values": np.zeros((ROWS, COLS), scales)}
    elif group == 0:
        size = {"Q4_K": COLS // 256 * 144, "Q8_0": COLS // 32 * 34}[format]
        parts = {"blocks": np.zeros((ROWS, size), np.uint8)}
    else:
        parts = {
            "codes": np.zeros((ROWS, COLS // (2 if format == "INT4" else 1)), np.uint8),
            "scales": np.zeros((ROWS, COLS // group), scales),
        }
        if zeros:
            parts["zeros"] = np.zeros((ROWS, COLS // group), np.uint8)
    return pack(format, ROWS, COLS, parts, dtype, "cpu")


def launch_product(made: DeviceMatrix, tokens: int, width: int, looped: bool, bias: bool) -> None:
    arch = driver.active.get_current_target().arch
    target = ProductTarget(arch == 90, MOST_SHARED[arch])
    width = min(width, width_of(made, tokens, target))
    tall = tall_tiles(made, tokens)
    tiles = tiles_of_width(made, width, tall, looped, target)
    x = torch.zeros(tokens, COLS, dtype=made.dtype)
    linear.product(x, made, torch.zeros(ROWS) if bias else None, None, None, tiles)


def products() -> list[tuple[str, Callable[[], None]]]:
    found: list[tuple[str, Callable[[], None]]] = []
    for dtype, formats, shapes in LAUNCHED:
        for stored in formats:
            made = matrix(*stored, dtype)
            for tokens, width, looped in shapes:
                kind = "looped" if looped else "separate"
                label = f"linear {stored[0]}/{stored[1]} {dtype} {tokens} tokens by {width} {kind}"
                found.append(
                    (label, partial(launch_product, made, tokens, width, looped, bias=looped))
                )
    return found


EXPERTS, TOP_K = 8, 2
# Scores, experts and groups of Qwen 3, gpt-oss, DeepSeek V2, V3 and Kimi K2.
ROUTED: dict[str, tuple[int, dict[str, Any]]] = {
    "8 of 128, softmax": (128, {"top_k": 8, "normalized": True}),
    "4 of 32, softmax": (32, {"top_k": 4, "normalized": True}),
    "6 of 160, softmax, groups": (
        160,
        {"top_k": 6, "groups": 8, "kept_groups": 3, "group_best": 1},
    ),
    "8 of 256, sigmoid, groups": (
        256,
        {"top_k": 8, "scores": "sigmoid", "groups": 8, "kept_groups": 4, "group_best": 2},
    ),
    "8 of 384, sigmoid": (384, {"top_k": 8, "scores": "sigmoid", "normalized": True}),
}


def route(experts: int, routing: dict[str, Any]) -> None:
    correction = torch.zeros(experts) if "scores" in routing else None
    choose(torch.zeros(4, experts), correction, **routing)


def groups_of(tokens: int, tile_tokens: int, experts: int = EXPERTS) -> Groups:
    return group(torch.zeros(tokens, TOP_K, dtype=torch.int32), experts, tile_tokens)


def launch_experts(made: DeviceMatrix, tokens: int) -> None:
    """Launch tiles for this many pairs per expert: with x of tokens, and with x of pairs and a
    bias."""
    parts = (made.values, made.scales, made.zeros)
    tensors = tuple(
        None if part is None else part[None].expand(EXPERTS, *part.shape).contiguous()
        for part in parts
    )
    stack = MatrixStack(made, tensors, torch.arange(EXPERTS, dtype=torch.int32))
    arch = driver.active.get_current_target().arch
    target = ProductTarget(arch == 90, MOST_SHARED[arch])
    width = tile_width(made, EXPERTS * tokens // 2, EXPERTS, target)
    tiles = tiles_of_group(made, width, target)
    groups = replace(groups_of(EXPERTS * tokens // 2 // TOP_K, 16), tile_tokens=width)
    pairs = len(groups.pairs)
    bias = torch.zeros(EXPERTS, ROWS)
    for by_pair in (False, True):
        x = torch.zeros(pairs if by_pair else pairs // TOP_K, COLS, dtype=made.dtype)
        out = torch.zeros(pairs, ROWS, dtype=made.dtype)
        given = bias if by_pair else None
        grouped_product(x, stack, groups, given, out, by_pair=by_pair, tiles=tiles)


def sums(tokens: int, top_k: int, shared: bool) -> None:
    groups = group(torch.zeros(tokens, top_k, dtype=torch.int32), 128, 16)
    x, gate = torch.zeros(tokens, 2048, dtype=torch.bfloat16), torch.zeros(tokens, 1)
    results = torch.zeros(tokens * top_k, 2048, dtype=torch.bfloat16)
    given = (x, gate) if shared else (None, None)
    combine(results, torch.zeros(tokens, top_k), groups, *given)


def experts() -> list[tuple[str, Callable[[], object]]]:
    found: list[tuple[str, Callable[[], object]]] = [
        (f"experts chosen, {label}", partial(route, *case)) for label, case in ROUTED.items()
    ]
    for tokens, label in ((4, "few"), (4096, "many")):
        for num_experts in (32, 128, 384):
            grouping = partial(groups_of, tokens, 16, num_experts)
            found.append((f"{label} pairs grouped, {num_experts} experts", grouping))
    for dtype, formats, shapes in LAUNCHED:
        if dtype == torch.float32:  # no backend on a device computes in it
            continue
        for stored in formats:
            made = matrix(*stored, dtype)
            for tokens in dict.fromkeys(tokens for tokens, *_ in shapes):
                label = f"experts {stored[0]}/{stored[1]} {dtype} {tokens} tokens"
                found.append((label, partial(launch_experts, made, tokens)))
    for shared in (False, True):
        label = "sum of 8 experts" + (" and the shared one" if shared else "")
        found.append((label, partial(sums, 4, 8, shared)))
    return found


SPLITS = 3


def layers() -> list[tuple[str, Callable[[], object]]]:
    found: list[tuple[str, Callable[[], object]]] = []
    for size in (1024, 4096, 8192):
        x, weight = torch.zeros(4, size, dtype=BF16), torch.zeros(size)
        found += [
            (f"norm of {size}", partial(norm, x, weight, None, 1e-6)),
            (f"layer norm of {size}", partial(norm, x, weight, weight, 1e-6, is_layer=True)),
            (f"sum and norm of {size}", partial(add_norm, x, x, weight, None, 1e-6)),
            (f"sum of three of {size}", partial(add, x, x, x, 0.5)),
        ]
        sums = SplitSums(torch.zeros(SPLITS, 4, size), weight, BF16)
        label = f"sums of splits and norm of {size}"
        found.append((label, partial(add_norm, x, sums, weight, None, 1e-6)))
    pair = torch.zeros(4, 4096, dtype=BF16)
    heads = partial(norm, pair, torch.zeros(4096), None, 1e-6, is_layer=True, heads=32)
    found.append(("layer norm of 32 heads of 128", heads))
    sums = SplitSums(torch.zeros(SPLITS, 4, 4096), None, BF16)
    found.append(("gated silu of sums of splits", partial(gated, sums, "silu")))
    for kind in ("silu", "gelu_tanh", "gelu", "relu2", "swiglu_oai"):
        found.append((f"gated {kind}", partial(gated, pair, kind)))
        if kind != "swiglu_oai":
            found.append((f"activated {kind}", partial(activated, pair, kind)))
    curve = {"a": 0.7, "b": 0.9, "beta": 0.4, "eps": -1e-6}
    found.append(("activated xielu", partial(xielu, pair, **curve)))
    for dim in (64, 80, 128, 256):
        for kv_dtype in (BF16, torch.float16):
            found.append((f"heads of {dim} to {kv_dtype}", partial(_heads, dim, kv_dtype)))
    return found


def _heads(dim: int, kv_dtype: torch.dtype) -> None:
    kv = torch.zeros(4, 2, 8, 16, dim, dtype=kv_dtype)
    x, numbers = torch.zeros(4, 32 * dim, dtype=BF16), torch.zeros(4, dtype=torch.int32)
    rotation = Rotation(torch.zeros(64, dim // 2), torch.zeros(64, dim // 2))
    norms = HeadNorms(torch.zeros(dim), torch.zeros(dim), 1e-6)
    heads = HeadRange(0, 16, 8, 8, dim)
    for some in (norms, None):
        prepare_heads(x, heads, some, rotation, numbers, kv, numbers)


VOCABS = (151_936, 50_257)  # the second is odd: no two rows have the same alignment


def sampling() -> list[tuple[str, Callable[[], object]]]:
    return [
        (f"{name}, {vocab} tokens", partial(call, vocab))
        for vocab in VOCABS
        for name, call in (("every kind of sample", _step), ("log-probabilities", _logprobs))
    ]


def _step(vocab: int) -> None:
    kinds = [
        StreamSettings(),
        StreamSettings(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05),
        StreamSettings(presence_penalty=1.0, logit_bias={1: 1.0}),
    ]
    ops = CudaSampling()
    streams = [ops.stream(kind, vocab) for kind in kinds]
    masks = [np.zeros((vocab + 31) // 32, np.uint32), None, None]
    ops.launch(torch.zeros(3, vocab), [0, 1, 2], streams, [[5], [5], [5]], masks)


def _logprobs(vocab: int) -> None:
    launch_logprobs(torch.zeros(3, vocab), torch.zeros(5, dtype=torch.int32), 20)


LAUNCHES = (attention, experts, layers, products, sampling)  # in the order of the table
