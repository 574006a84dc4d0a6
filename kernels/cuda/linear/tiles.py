"""How a product with a weight matrix is cut into programs: into splits of a row by the matrix
alone, since they decide its sums; into tiles by the number of tokens and the device, too, which
change no bit."""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from triton.runtime import driver

from pdserve.kernels.cuda.linear.packing import DeviceMatrix

PROCESSORS = 132  # of an H100: it is the aim; the results of another device are the same
ENOUGH_TALL = 96  # programs of tall tiles that are worth more than sums of splits in memory
SPLIT_COLUMNS = 512  # at least: shorter splits take longer to add than to multiply
# Of shared memory, for loads under way.
NARROW, TALL, WIDE, PACKED_NARROW = 56 << 10, 100 << 10, 144 << 10, 72 << 10
MOST_STAGES, MOST_PACKED_STAGES = 5, 3
OTHER_BYTES = 16 << 10  # of shared memory, for what is not loads
MOST_REGISTERS = 168  # with few sums; left alone, the compiler spills for programs that do not fit


class ProductTarget(NamedTuple):
    """What of a device decides how products are cut."""

    is_hopper: bool = True
    shared_bytes: int = 227 << 10  # that a block may have


@dataclass(frozen=True)
class Tiles:
    """How a product is cut; none of it changes a bit of the result."""

    rows: int
    tokens: int
    warps: int
    stages: int
    looped: bool  # one program adds all splits of its tile


def splits_of(matrix: DeviceMatrix) -> tuple[int, int]:
    """The number of splits of a row, and the blocks of each but the last; by shape and format
    alone. AFFINE takes more programs, to hide how long each step of one takes."""
    tiles, of_processor = -(-matrix.rows // 64), 4 if matrix.layout.kind == "AFFINE" else 2
    wanted = -(-of_processor * PROCESSORS // tiles) if tiles < 2 * PROCESSORS else 1
    length = max(-(-matrix.blocks // wanted), SPLIT_COLUMNS // matrix.layout.block)
    return -(-matrix.blocks // length), length


LARGEST = ProductTarget()


@cache
def target_of(device: torch.device) -> ProductTarget:
    """That of a device of this machine; a CPU, where kernels are interpreted, counts as the
    largest."""
    if device.type != "cuda":
        return LARGEST
    shared = driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    return ProductTarget(torch.cuda.get_device_capability(device)[0] == 9, shared)


def width_of(matrix: DeviceMatrix, tokens: int, target: ProductTarget = LARGEST) -> int:
    """The most tokens of a tile. Before Hopper products of 4 bits have too few registers for the
    widest."""
    widest = 128 if target.is_hopper or matrix.layout.bits > 4 else 64
    if matrix.dtype == torch.float32:  # no tensor cores: products take registers, too
        widest = 32
    return next(n for n in (16, 32, 64, 128) if tokens <= n or n == widest)


def tiles_of(matrix: DeviceMatrix, tokens: int, target: ProductTarget = LARGEST) -> Tiles:
    """Few tokens: narrow tiles, several programs a multiprocessor, and a program for each split as
    long as there are too few tiles to occupy the device. Many: wide tiles, which read less often,
    and narrower ones rather than sums of splits in memory.
    """
    width = width_of(matrix, tokens, target)
    tall = tall_tiles(matrix, tokens)
    row_tiles = -(-matrix.rows // (128 if tall else 64))
    enough = ENOUGH_TALL if tall else PROCESSORS
    looped = splits_of(matrix)[0] == 1 or row_tiles * -(-tokens // width) >= enough
    if tall and not looped and row_tiles * -(-tokens // 64) >= enough:
        width, looped = 64, True
    return tiles_of_width(matrix, width, tall, looped, target)


def tall_tiles(matrix: DeviceMatrix, tokens: int) -> bool:
    """Whether a tile has 128 rows, or 64."""
    return tokens > 64 and matrix.dtype != torch.float32


def tiles_of_width(
    matrix: DeviceMatrix, width: int, tall: bool, looped: bool, target: ProductTarget
) -> Tiles:
    """Those of `width` tokens."""
    layout, size = matrix.layout, matrix.dtype.itemsize
    is_plain, is_affine = layout.kind == "PLAIN", layout.kind == "AFFINE"
    tall = tall or (is_affine and looped)
    height = 128 if tall else 64
    warps = 8 if tall and (width == 128 or not (is_plain or is_affine)) else 4
    row_bytes = layout.word_bytes or layout.block * size
    stage_bytes = height * row_bytes + width * layout.block * size
    if is_plain:
        room, most = (WIDE if looped and warps == 8 else TALL if tall else NARROW), MOST_STAGES
    else:
        room, most = (WIDE if tall else PACKED_NARROW), MOST_PACKED_STAGES
    stages = min(room, target.shared_bytes - OTHER_BYTES) // stage_bytes
    return Tiles(height, width, warps, min(most, max(2, stages)), looped)


def register_limit(tiles: Tiles, dtype: torch.dtype) -> int:
    """Of a thread."""
    sums = 2 * tiles.rows * tiles.tokens // (32 * tiles.warps)  # of a split, and of all
    return 255 if dtype == torch.float32 or sums > 64 else MOST_REGISTERS
