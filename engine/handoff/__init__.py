"""Transfers the KV of a request from one worker to another, verified block by block."""
