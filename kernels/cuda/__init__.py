"""Triton kernels for CUDA devices."""

from pdserve.kernels.cuda.copy_hash import INTACT, SHARE_BYTES, SHARES_AT, CopyHash
