"""Reasoning of Kimi K3."""

from pdserve.text.parsing import between_tags

AROUND = "<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"

FAMILY = between_tags(
    "kimi_k3",
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|>",
    recognized_by="<|open|>",
    special=("<|open|>", "<|close|>", "<|sep|>"),
    answers=AROUND[:1],
    around=AROUND,
)
