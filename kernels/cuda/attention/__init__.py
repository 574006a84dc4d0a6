"""Paged attention on CUDA devices."""

from pdserve.kernels.cuda.attention.paged import (
    HEAD_STEP,
    LATENT_SPLIT,
    SPLIT,
    Rows,
    chunk_tiles,
    paged_attention,
)
