"""The KV pool: its geometry, blocks, prefix cache and identity."""
