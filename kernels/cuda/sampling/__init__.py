"""Sampling on the device."""

from pdserve.kernels.cuda.sampling.step import CudaSampling
