"""Reasoning of MiniMax M3."""

from pdserve.text.parsing import between_tags

FAMILY = between_tags("minimax_m3", "<mm:think>", "</mm:think>")
