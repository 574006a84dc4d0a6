"""Transfers the KV cache of a request from one worker to another, verified block by block."""
