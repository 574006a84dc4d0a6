"""The calls of gpt-oss: Harmony messages to functions."""

from pdserve.text.parsing import (
    CHANNEL,
    FINAL,
    MESSAGE,
    SPECIAL,
    CallForm,
    HarmonyStream,
    ToolFamily,
)

_CALL = f"{CHANNEL}commentary to=functions."

FAMILY = ToolFamily(
    "gpt_oss",
    lambda template: CHANNEL in template and MESSAGE in template,
    # No end tag: <|call|> ends the answer, so a grammar must not require it.
    CallForm(f"{_CALL}NAME <|constrain|>json{MESSAGE}", "", trigger=_CALL),
    special=SPECIAL,
    make_parser=HarmonyStream,
    opening=FINAL,
)
