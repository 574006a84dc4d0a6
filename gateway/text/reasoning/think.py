"""Thoughts in <think>, of Qwen 3, DeepSeek, GLM, MiniMax, Kimi and many others."""

from pdserve.gateway.text.parsing.family import ReasoningFamily
from pdserve.gateway.text.parsing.thought import ThoughtStream

BEGIN, END = "<think>", "</think>"

FAMILY = ReasoningFamily(
    "think",
    lambda template: END in template,
    lambda open: ThoughtStream(BEGIN, END, open=open),
    BEGIN,
    END,
    after=END,
    special=(BEGIN, END),
)
