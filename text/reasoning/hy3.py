"""Reasoning of Hy3."""

from pdserve.text.parsing import between_tags

END = "</think:opensource>"

FAMILY = between_tags(
    "hy3",
    "<think:opensource>",
    END,
    recognized_by=lambda template: "</think{" in template or END in template,
)
