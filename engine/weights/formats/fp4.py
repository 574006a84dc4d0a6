"""Formats of 4-bit floats with a shared scale (OCP MX, NVFP4)."""

from pdserve.engine.weights.formats.by_gguf import gguf_format

NAMES = "MXFP4 NVFP4"
FORMATS = tuple(gguf_format(name) for name in NAMES.split())
