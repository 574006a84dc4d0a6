"""KV from GPU to GPU on one host, by CUDA IPC."""
