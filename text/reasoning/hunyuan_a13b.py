"""Reasoning of Hunyuan A13B, which writes its text in <answer>."""

from pdserve.text.parsing import between_tags, lines_around

BEGIN, END, THOUGHT_END = "<answer>", "</answer>", "</think>"

FAMILY = between_tags(
    "hunyuan_a13b",
    "<think>",
    THOUGHT_END,
    recognized_by=lambda template: THOUGHT_END in template and BEGIN in template,
    around=lines_around(BEGIN, END),
)
