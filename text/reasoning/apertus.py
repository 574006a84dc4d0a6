"""Reasoning of Apertus."""

from pdserve.text.parsing import between_tags

FAMILY = between_tags("apertus", "<|inner_prefix|>", "<|inner_suffix|>")
