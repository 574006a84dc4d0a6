"""Sampling of the next tokens on CUDA devices."""

from pdserve.kernels.cuda.sampling.step import CudaSampling
