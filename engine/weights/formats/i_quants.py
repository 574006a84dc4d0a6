"""Formats whose levels come from codebooks or non-linear tables (IQ)."""

from pdserve.engine.weights.formats.by_gguf import gguf_format

NAMES = "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS"
FORMATS = tuple(gguf_format(name) for name in NAMES.split())
