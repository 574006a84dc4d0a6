"""Thoughts of Gemma 4, on a channel of their own."""

from pdserve.gateway.text.parsing.family import ReasoningFamily
from pdserve.gateway.text.parsing.thought import ThoughtStream

BEGIN, END = "<|channel>thought", "<channel|>"

FAMILY = ReasoningFamily(
    "gemma4",
    lambda template: END in template,
    lambda open: ThoughtStream(BEGIN, END, open=open),
    BEGIN,
    END,
    after=END,
    special=(BEGIN, END),
)
