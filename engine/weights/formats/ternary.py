"""Formats of three levels: minus one, zero, one."""

from pdserve.engine.weights.by_gguf import gguf_format

FORMATS = (gguf_format("TQ1_0", 256, 54), gguf_format("TQ2_0", 256, 66))
