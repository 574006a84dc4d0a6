"""Reasoning of Gemma 4, on a separate channel."""

from pdserve.text.parsing import between_tags

END = "<channel|>"

FAMILY = between_tags("gemma4", "<|channel>thought", END, around=(END,))
