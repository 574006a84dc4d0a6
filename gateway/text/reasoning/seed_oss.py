"""Thoughts of Seed-OSS."""

from pdserve.gateway.text.parsing.family import ReasoningFamily
from pdserve.gateway.text.parsing.thought import ThoughtStream

BEGIN, END = "<seed:think>", "</seed:think>"

FAMILY = ReasoningFamily(
    "seed_oss",
    lambda template: BEGIN in template,
    lambda open: ThoughtStream(BEGIN, END, open=open),
    BEGIN,
    END,
    after=END,
    special=(BEGIN, END),
)
