"""The inference engine of one process: scheduler, KV pool, models, checkpoints, and the transfer
of KV to other processes."""
