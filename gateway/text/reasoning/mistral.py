"""Thoughts of Magistral and Ministral."""

from pdserve.gateway.text.parsing.family import ReasoningFamily
from pdserve.gateway.text.parsing.thought import ThoughtStream

BEGIN, END = "[THINK]", "[/THINK]"

FAMILY = ReasoningFamily(
    "mistral",
    lambda template: BEGIN in template,
    lambda open: ThoughtStream(BEGIN, END, open=open),
    BEGIN,
    END,
    after=END,
    special=(BEGIN, END),
)
