"""Formats whose levels come from codebooks or non-linear tables (IQ)."""

from pdserve.engine.weights.by_gguf import gguf_format

FORMATS = (
    gguf_format("IQ1_S", 256, 50),
    gguf_format("IQ1_M", 256, 56),
    gguf_format("IQ2_XXS", 256, 66),
    gguf_format("IQ2_XS", 256, 74),
    gguf_format("IQ2_S", 256, 82),
    gguf_format("IQ3_XXS", 256, 98),
    gguf_format("IQ3_S", 256, 110),
    gguf_format("IQ4_NL", 32, 18),
    gguf_format("IQ4_XS", 256, 136),
)
