"""Every operation in plain torch, on any device: the oracle for faster backends."""

from pdserve.kernels.reference.activation import gated
from pdserve.kernels.reference.attention import paged_attention, write_kv
from pdserve.kernels.reference.linear import linear
from pdserve.kernels.reference.noise import gumbel_argmax, gumbel_at, gumbel_noise
from pdserve.kernels.reference.norm import add_rms_norm, rms_norm
from pdserve.kernels.reference.rope import rope

__all__ = [
    "add_rms_norm",
    "gated",
    "gumbel_argmax",
    "gumbel_at",
    "gumbel_noise",
    "linear",
    "paged_attention",
    "rms_norm",
    "rope",
    "write_kv",
]
