"""Reasoning of Seed-OSS."""

from pdserve.text.parsing import between_tags

FAMILY = between_tags("seed_oss", "<seed:think>", "</seed:think>", recognized_by="<seed:think>")
