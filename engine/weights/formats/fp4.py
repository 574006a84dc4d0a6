"""Formats of 4-bit floats with a shared scale (OCP MX, NVFP4)."""

from pdserve.engine.weights.by_gguf import gguf_format

FORMATS = (gguf_format("MXFP4", 32, 17), gguf_format("NVFP4", 64, 36))
