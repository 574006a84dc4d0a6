"""Reasoning of Apriel, between sentences instead of tags."""

from pdserve.text.parsing import between_tags

FAMILY = between_tags(
    "apriel", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", special=()
)
