"""Operations between the products of a layer: norms, rope, activations."""

from pdserve.kernels.cuda.layer.activation import activated, gated
from pdserve.kernels.cuda.layer.heads import HeadNorms, HeadRange, Rotation, prepare_heads
from pdserve.kernels.cuda.layer.norm import add, add_norm
