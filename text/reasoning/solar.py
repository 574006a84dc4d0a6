"""Reasoning of Solar Open: a message before the answer's message."""

from pdserve.text.parsing import between_tags

BEGIN, NEXT = "<|think|>", "<|end|><|begin|>assistant"
AROUND = "<|content|>", NEXT, "<|end|>", "<|tool_calls|>", "<|calls|>"

FAMILY = between_tags(
    "solar",
    BEGIN,
    NEXT,
    recognized_by=lambda template: f"assistant{BEGIN}" in template and AROUND[0] in template,
    special=(BEGIN, "<|end|>", "<|begin|>"),
    around=AROUND,
)
