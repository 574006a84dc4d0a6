"""How KV travels between processes: TCP, shared memory, CUDA IPC."""
