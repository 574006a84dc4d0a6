"""The data connections between prefill and decode workers."""
