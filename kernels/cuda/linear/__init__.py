"""Products of tokens with packed weight matrices, on CUDA devices."""

from pdserve.kernels.cuda.linear.packing import BITS, DeviceMatrix, pack
from pdserve.kernels.cuda.linear.product import (
    SIDE,
    SplitSums,
    added,
    finish,
    linear,
    operands,
    row_sum,
    split_linear,
)
from pdserve.kernels.cuda.linear.tiles import (
    LARGEST,
    ProductTarget,
    Tiles,
    register_limit,
    splits_of,
    tall_tiles,
    target_of,
    tiles_of_width,
    width_of,
)
