"""Formats of three levels: minus one, zero, one."""

from pdserve.engine.weights.bits import half
from pdserve.engine.weights.levels import level_format

FORMATS = (
    level_format("TQ1_0", 256, 54, lambda blocks: half(blocks, 52)),
    level_format("TQ2_0", 256, 66, lambda blocks: half(blocks, 64)),
)
