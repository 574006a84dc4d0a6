"""Reasoning of Command R7B and Command A."""

from pdserve.text.parsing import between_tags

FAMILY = between_tags(
    "command_a",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    around=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
