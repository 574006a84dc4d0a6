"""Thoughts of Kimi K3."""

from pdserve.gateway.text.parsing.thought import between_tags

FAMILY = between_tags(
    "kimi_k3",
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|>",
    known_by="<|open|>",
    special=("<|open|>", "<|close|>", "<|sep|>"),
)
