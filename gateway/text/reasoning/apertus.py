"""Thoughts of Apertus."""

from pdserve.gateway.text.parsing.family import ReasoningFamily
from pdserve.gateway.text.parsing.thought import ThoughtStream

BEGIN, END = "<|inner_prefix|>", "<|inner_suffix|>"

FAMILY = ReasoningFamily(
    "apertus",
    lambda template: END in template,
    lambda open: ThoughtStream(BEGIN, END, open=open),
    BEGIN,
    END,
    after=END,
    special=(BEGIN, END),
)
