"""Every kernel operation in plain torch, for any device: the reference for faster backends."""

from pdserve.kernels.reference.layers import (
    activated,
    gated,
    layer_norm,
    linear,
    paged_attention,
    rms_norm,
    rope,
    write_kv,
    xielu,
)
from pdserve.kernels.reference.sampling import logprobs, sample, stream
