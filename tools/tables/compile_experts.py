"""Launches of kernels/cuda/experts that together compile each of its kernels."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import compile_linear
import torch
from compile_only import MOST_SHARED
from triton.runtime import driver

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
from pdserve.kernels.cuda.linear import DeviceMatrix, ProductTarget

EXPERTS, TOP_K = 8, 2
ROWS, COLS = compile_linear.ROWS, compile_linear.COLS
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


def launch(made: DeviceMatrix, tokens: int) -> None:
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


def launches() -> list[tuple[str, Callable[[], object]]]:
    """Yield a label and a launch for each variant."""
    found: list[tuple[str, Callable[[], object]]] = [
        (f"experts chosen, {label}", partial(route, *case)) for label, case in ROUTED.items()
    ]
    for tokens, label in ((4, "few"), (4096, "many")):
        for experts in (32, 128, 384):
            grouping = partial(groups_of, tokens, 16, experts)
            found.append((f"{label} pairs grouped, {experts} experts", grouping))
    for dtype, formats, shapes in compile_linear.LAUNCHED:
        if dtype == torch.float32:  # no backend on a device computes in it
            continue
        for stored in formats:
            made = compile_linear.matrix(*stored, dtype)
            for tokens in dict.fromkeys(tokens for tokens, *_ in shapes):
                label = f"experts {stored[0]}/{stored[1]} {dtype} {tokens} tokens"
                found.append((label, partial(launch, made, tokens)))
    for shared in (False, True):
        label = "sum of 8 experts" + (" and the shared one" if shared else "")
        found.append((label, partial(sums, 4, 8, shared)))
    return found
