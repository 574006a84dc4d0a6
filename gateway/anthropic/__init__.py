"""Anthropic's API: messages and token counts."""
