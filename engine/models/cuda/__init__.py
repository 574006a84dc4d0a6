"""The decoder on the CUDA kernels."""

from pdserve.engine.models.cuda.decoder import CudaDecoder
from pdserve.engine.models.cuda.graphs import CudaRecorder, row_counts
