"""Thoughts of MiniMax M3."""

from pdserve.gateway.text.parsing.family import ReasoningFamily
from pdserve.gateway.text.parsing.thought import ThoughtStream

BEGIN, END = "<mm:think>", "</mm:think>"

FAMILY = ReasoningFamily(
    "minimax_m3",
    lambda template: END in template,
    lambda open: ThoughtStream(BEGIN, END, open=open),
    BEGIN,
    END,
    after=END,
    special=(BEGIN, END),
)
