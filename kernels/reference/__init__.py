"""Every operation in plain torch, for any device: the reference for faster backends."""

from pdserve.kernels.reference.activation import activated, gated
from pdserve.kernels.reference.attention import paged_attention, write_kv
from pdserve.kernels.reference.linear import linear
from pdserve.kernels.reference.logprobs import logprobs
from pdserve.kernels.reference.norm import layer_norm, rms_norm
from pdserve.kernels.reference.rope import rope
from pdserve.kernels.reference.sampling import sample, stream

__all__ = [
    "activated",
    "gated",
    "layer_norm",
    "linear",
    "logprobs",
    "paged_attention",
    "rms_norm",
    "rope",
    "sample",
    "stream",
    "write_kv",
]
