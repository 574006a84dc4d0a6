"""Formats of three levels: minus one, zero, one."""

from pdserve.engine.weights.formats.by_gguf import gguf_format

NAMES = "TQ1_0 TQ2_0"
FORMATS = tuple(gguf_format(name) for name in NAMES.split())
