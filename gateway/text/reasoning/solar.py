"""Thoughts of Solar Open: a message before that of the answer."""

from pdserve.gateway.text.parsing.family import ReasoningFamily
from pdserve.gateway.text.parsing.thought import ThoughtStream

BEGIN, END = "<|think|>", "<|end|><|begin|>assistant"
AROUND = "<|content|>", "<|end|>", "<|tool_calls|>", "<|calls|>"

FAMILY = ReasoningFamily(
    "solar",
    lambda template: f"assistant{BEGIN}" in template and AROUND[0] in template,
    lambda open: ThoughtStream(BEGIN, END, open=open),
    BEGIN,
    END,
    after=END,
    special=(BEGIN, "<|end|>", "<|begin|>"),
    around=AROUND,
)
