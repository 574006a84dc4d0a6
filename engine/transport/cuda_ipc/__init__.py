"""The cuda_ipc transport, which copies KV from GPU to GPU on one host."""

from pdserve.engine.transport.cuda_ipc.device_cupy import opener
