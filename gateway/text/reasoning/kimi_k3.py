"""Thoughts of Kimi K3."""

from pdserve.gateway.text.parsing.family import ReasoningFamily
from pdserve.gateway.text.parsing.thought import ThoughtStream

BEGIN, END = "<|open|>think<|sep|>", "<|close|>think<|sep|>"
AROUND = "<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"

FAMILY = ReasoningFamily(
    "kimi_k3",
    lambda template: "<|open|>" in template,
    lambda open: ThoughtStream(BEGIN, END, open=open, answers=AROUND[:1]),
    BEGIN,
    END,
    after=END,
    special=("<|open|>", "<|close|>", "<|sep|>"),
    around=AROUND,
)
