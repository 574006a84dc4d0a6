"""Sorts (token, expert) pairs by expert, in Triton: a counting sort whose result does not depend on
the order of execution. The host never reads how many pairs an expert has."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW_PAIRS, MANY_PAIRS = 1024, 4096  # pairs read per step of a program
TILE_LANES: tl.constexpr = tl.constexpr(64)


@dataclass(frozen=True)
class Groups:
    """Pairs sorted by expert and then by token, divided into tiles of one expert each. All tensors
    are int32."""

    pairs: Tensor  # [pairs]: token * top_k + rank
    places: Tensor  # [tokens, top_k]: position of each pair in `pairs`
    ends: Tensor  # [experts]: end of each expert's pairs
    tile_experts: Tensor  # [tiles]; -1: unused tile
    tile_firsts: Tensor  # [tiles]: first pair of each tile
    tile_tokens: int  # max pairs per tile

    @property
    def top_k(self) -> int:
        return self.places.shape[1]


def group(chosen: Tensor, experts: int, tile_tokens: int) -> Groups:
    """Group the pairs of chosen experts, contiguous int32 [tokens, top_k], distinct per token."""
    if chosen.dtype != torch.int32 or not chosen.is_contiguous():
        raise ValueError(f"chosen are {chosen.dtype}, strides {chosen.stride()}")

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=chosen.device)

    count = chosen.numel()
    tiles = max_tiles(count, experts, tile_tokens)
    groups = Groups(
        numbers(count),
        numbers(*chosen.shape),
        numbers(experts),
        numbers(tiles),
        numbers(tiles),
        tile_tokens,
    )
    if count:
        block = FEW_PAIRS if count <= FEW_PAIRS else MANY_PAIRS
        _group[(experts,)](
            chosen,
            groups.pairs,
            groups.places,
            groups.ends,
            groups.tile_experts,
            groups.tile_firsts,
            count,
            tiles,
            experts,
            TILE=tile_tokens,
            BINS=triton.next_power_of_2(experts),
            BLOCK=block,
            num_warps=4 if block == FEW_PAIRS else 8,
        )
    return groups


def max_tiles(pairs: int, experts: int, tile_tokens: int) -> int:
    """Return the largest possible number of tiles."""
    used_experts = min(pairs, experts)
    return used_experts + (pairs - used_experts) // tile_tokens


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _group(
    chosen, pairs, places, ends, tile_experts, tile_firsts, num_pairs, num_tiles, experts,
    TILE: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: experts. Each program counts the pairs of all experts and places its own pairs."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    counts = tl.zeros((BINS,), tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        valid = begin + lanes < num_pairs
        experts_read = tl.load(chosen + begin + lanes, mask=valid, other=0)
        counts += tl.histogram(experts_read, BINS, mask=valid)
    bins = tl.arange(0, BINS)
    tiles = (counts + (TILE - 1)) // TILE
    first = tl.sum(tl.where(bins < expert, counts, 0), 0)
    end = tl.sum(tl.where(bins <= expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(bins < expert, tiles, 0), 0)
    end_tile = tl.sum(tl.where(bins <= expert, tiles, 0), 0)
    tl.store(ends + expert, end)
    next_index = first
    for begin in range(0, num_pairs, BLOCK):
        valid = begin + lanes < num_pairs
        is_own = tl.load(chosen + begin + lanes, mask=valid, other=-1) == expert
        index = next_index + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(pairs + index, begin + lanes, mask=is_own)
        tl.store(places + begin + lanes, index, mask=is_own)
        next_index += tl.sum(is_own.to(tl.int32), 0)
    # The last expert fills the rest.
    tiles_end = tl.where(expert == experts - 1, num_tiles, end_tile)
    for begin in range(first_tile, tiles_end, TILE_LANES):
        tile = begin + tl.arange(0, TILE_LANES)
        tl.store(tile_experts + tile, tl.where(tile < end_tile, expert, -1), mask=tile < tiles_end)
        tl.store(tile_firsts + tile, first + (tile - first_tile) * TILE, mask=tile < end_tile)
