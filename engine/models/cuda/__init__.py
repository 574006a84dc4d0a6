"""The decoder that runs models on pdserve's CUDA kernels."""

from pdserve.engine.models.cuda.decoder import CudaDecoder, CudaRecorder, row_counts
