"""How a product with a weight matrix is divided into programs. Splits of a row affect the sums, so
they depend on the matrix only. Tiles affect no bit of a result, so they also depend on the number
of tokens and the device."""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from triton.runtime import driver

from pdserve.kernels.cuda.linear.packing import DeviceMatrix

PROCESSORS = 132  # of an H100, the tuning target; results are the same on other devices
MIN_TALL_TILES = 96  # from this many programs, tall tiles are faster than split sums in memory
SPLIT_COLUMNS = 512  # at least: shorter splits take longer to add than to multiply
# Bytes of shared memory for loads in flight.
NARROW, TALL, WIDE, PACKED_NARROW = 56 << 10, 100 << 10, 144 << 10, 72 << 10
MAX_STAGES, MAX_PACKED_STAGES = 5, 3
OTHER_BYTES = 16 << 10  # shared memory for other uses than loads
MAX_REGISTERS = 168  # for few sums; without a limit, the compiler spills to fit more programs


class ProductTarget(NamedTuple):
    """The properties of a device that determine the tiling of products."""

    is_hopper: bool = True
    shared_bytes: int = 227 << 10  # max shared memory per thread block


@dataclass(frozen=True)
class Tiles:
    """The tiling of a product: tile sizes, warps and pipeline stages. It affects no bit of the
    result."""

    rows: int
    tokens: int
    warps: int
    stages: int
    looped: bool  # one program adds all splits of its tile


def splits_of(matrix: DeviceMatrix) -> tuple[int, int]:
    """Return the number of splits of each row of a matrix, and the number of blocks in each split
    but the last. Both depend on shape and format only. AFFINE gets more programs, to hide the
    latency of its steps."""
    tiles, per_processor = -(-matrix.rows // 64), 4 if matrix.layout.kind == "AFFINE" else 2
    num_splits = -(-per_processor * PROCESSORS // tiles) if tiles < 2 * PROCESSORS else 1
    length = max(-(-matrix.blocks // num_splits), SPLIT_COLUMNS // matrix.layout.block)
    return -(-matrix.blocks // length), length


LARGEST = ProductTarget()


@cache
def target_of(device: torch.device) -> ProductTarget:
    """Return the properties of a device for the choice of tilings; a CPU, where kernels are
    interpreted, counts as LARGEST."""
    if device.type != "cuda":
        return LARGEST
    shared = driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    return ProductTarget(torch.cuda.get_device_capability(device)[0] == 9, shared)


def width_of(matrix: DeviceMatrix, tokens: int, target: ProductTarget = LARGEST) -> int:
    """Return the number of tokens per tile of a product with `tokens` tokens. Before Hopper, 4-bit
    products have too few registers for the widest tile."""
    widest = 128 if target.is_hopper or matrix.layout.bits > 4 else 64
    if matrix.dtype == torch.float32:  # no tensor cores: products take registers, too
        widest = 32
    return next(n for n in (16, 32, 64, 128) if tokens <= n or n == widest)


def tiles_of(matrix: DeviceMatrix, tokens: int, target: ProductTarget = LARGEST) -> Tiles:
    """Choose the tiling of a product with `tokens` tokens. Few tokens get narrow tiles, several
    programs per multiprocessor, and a program per split while there are too few tiles to occupy the
    device. Many tokens get wide tiles, which read weights less often; narrower tiles are preferred
    to split sums in memory."""
    width = width_of(matrix, tokens, target)
    tall = tall_tiles(matrix, tokens)
    row_tiles = -(-matrix.rows // (128 if tall else 64))
    min_tiles = MIN_TALL_TILES if tall else PROCESSORS
    looped = splits_of(matrix)[0] == 1 or row_tiles * -(-tokens // width) >= min_tiles
    if tall and not looped and row_tiles * -(-tokens // 64) >= min_tiles:
        width, looped = 64, True
    return tiles_of_width(matrix, width, tall, looped, target)


def tall_tiles(matrix: DeviceMatrix, tokens: int) -> bool:
    """Return whether the tiles of a product with `tokens` tokens have 128 rows instead of 64."""
    return tokens > 64 and matrix.dtype != torch.float32


def tiles_of_width(
    matrix: DeviceMatrix, width: int, tall: bool, looped: bool, target: ProductTarget
) -> Tiles:
    """Return the tiling with tiles of `width` tokens and, if `tall`, 128 rows instead of 64."""
    layout, size = matrix.layout, matrix.dtype.itemsize
    is_plain, is_affine = layout.kind == "PLAIN", layout.kind == "AFFINE"
    tall = tall or (is_affine and looped)
    height = 128 if tall else 64
    warps = 8 if tall and (width == 128 or not (is_plain or is_affine)) else 4
    row_bytes = layout.word_bytes or layout.block * size
    stage_bytes = height * row_bytes + width * layout.block * size
    if is_plain:
        load_bytes, max_stages = (
            (WIDE if looped and warps == 8 else TALL if tall else NARROW),
            MAX_STAGES,
        )
    else:
        load_bytes, max_stages = (WIDE if tall else PACKED_NARROW), MAX_PACKED_STAGES
    stages = min(load_bytes, target.shared_bytes - OTHER_BYTES) // stage_bytes
    return Tiles(height, width, warps, min(max_stages, max(2, stages)), looped)


def register_limit(tiles: Tiles, dtype: torch.dtype) -> int:
    """Return the maximum number of registers per thread with which to compile a product."""
    sums = 2 * tiles.rows * tiles.tokens // (32 * tiles.warps)  # of one split and of all splits
    return 255 if dtype == torch.float32 or sums > 64 else MAX_REGISTERS
