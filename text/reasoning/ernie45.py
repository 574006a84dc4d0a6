"""Reasoning of ERNIE 4.5 and Granite 3.3, which write their text in <response>."""

from pdserve.text.parsing import between_tags, lines_around

BEGIN, END, THOUGHT_END = "<response>", "</response>", "</think>"
OTHERS = "minimax"  # of a family that has results of tools in this tag

FAMILY = between_tags(
    "ernie45",
    "<think>",
    THOUGHT_END,
    recognized_by=lambda t: THOUGHT_END in t and BEGIN in t and OTHERS not in t,
    around=lines_around(BEGIN, END),
)
