"""The decoder on the CUDA kernels."""

from pdserve.engine.models.cuda.decoder import CudaDecoder, CudaRecorder, row_counts
