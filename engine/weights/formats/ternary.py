"""Formats of three levels: minus one, zero, one."""

from pdserve.engine.weights.formats.levels import halves, level_format

FORMATS = (
    level_format("TQ1_0", 256, 54, lambda blocks: halves(blocks[:, 52:54])),
    level_format("TQ2_0", 256, 66, lambda blocks: halves(blocks[:, 64:66])),
)
