"""The prefill worker: computes the KV of prompts and sends it to decode workers."""
