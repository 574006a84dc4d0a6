"""Reasoning of Magistral and Ministral."""

from pdserve.text.parsing import between_tags

FAMILY = between_tags("mistral", "[THINK]", "[/THINK]", recognized_by="[THINK]")
