"""Thoughts of Command R7B and Command A."""

from pdserve.gateway.text.parsing.family import ReasoningFamily
from pdserve.gateway.text.parsing.thought import ThoughtStream

BEGIN, END = "<|START_THINKING|>", "<|END_THINKING|>"
AROUND = "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"

FAMILY = ReasoningFamily(
    "command_a",
    lambda template: END in template,
    lambda open: ThoughtStream(BEGIN, END, open=open),
    BEGIN,
    END,
    after=END,
    special=(BEGIN, END),
    around=AROUND,
)
