"""Records the steps of every KV transfer, and checks recordings against the protocol."""
