"""Thoughts of Apriel, between sentences in place of tags."""

from pdserve.gateway.text.parsing.family import ReasoningFamily
from pdserve.gateway.text.parsing.thought import ThoughtStream

BEGIN, END = "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"

FAMILY = ReasoningFamily(
    "apriel",
    lambda template: END in template,
    lambda open: ThoughtStream(BEGIN, END, open=open),
    BEGIN,
    END,
    after=END,
)
