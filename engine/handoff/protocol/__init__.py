"""The protocol of a KV transfer: its state machine, messages, frames and keys; no I/O."""
