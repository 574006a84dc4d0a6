"""Reasoning in <think>, of Qwen 3, DeepSeek, GLM, MiniMax, Kimi and many others."""

from pdserve.text.parsing import between_tags

FAMILY = between_tags("think", "<think>", "</think>")
