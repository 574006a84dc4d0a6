"""Reasoning of Muse Glimmer: messages to the model itself, before those to the user."""

from pdserve.text.parsing import ReasoningFamily, ThoughtStream

MESSAGE, NEXT = "<|message|>", "<|eom|><|start|>assistant"
BEGIN, USER = f"to=self{MESSAGE}", f"to=user{MESSAGE}"
AROUND = NEXT, "<|eot|>", f" {USER}", USER

FAMILY = ReasoningFamily(
    "muse_glimmer",
    lambda template: "<|eom|>" in template and "to=self" in template,
    lambda open: ThoughtStream(BEGIN, NEXT, open=open, several=True),
    BEGIN,
    NEXT,
    after=USER,
    special=(MESSAGE, "<|eom|>", "<|start|>"),
    around=AROUND,
)
