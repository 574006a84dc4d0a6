"""KV from GPU to GPU on one host, by CUDA IPC."""

from pdserve.engine.transport.cuda_ipc.device_cupy import opener
