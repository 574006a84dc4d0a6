"""The decoder on the CUDA kernels."""
