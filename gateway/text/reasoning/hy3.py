"""Thoughts of Hy3."""

from pdserve.gateway.text.parsing.family import ReasoningFamily
from pdserve.gateway.text.parsing.thought import ThoughtStream

BEGIN, END = "<think:opensource>", "</think:opensource>"

FAMILY = ReasoningFamily(
    "hy3",
    lambda template: "</think{" in template or END in template,
    lambda open: ThoughtStream(BEGIN, END, open=open),
    BEGIN,
    END,
    after=END,
    special=(BEGIN, END),
)
