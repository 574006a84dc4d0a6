"""Reasoning of gpt-oss: Harmony messages on the channel analysis."""

from pdserve.text.parsing import (
    CHANNEL,
    END,
    FINAL,
    MESSAGE,
    SPECIAL,
    HarmonyStream,
    ReasoningFamily,
)

FAMILY = ReasoningFamily(
    "gpt_oss",
    lambda template: CHANNEL in template and MESSAGE in template,
    lambda open: HarmonyStream(calls=False),
    "<think>",
    "</think>",
    after=f"{CHANNEL}final",  # <|constrain|>json may follow
    lead=MESSAGE,
    special=SPECIAL,
    written=(f"{CHANNEL}analysis{MESSAGE}", END),
    opening=FINAL,
)
