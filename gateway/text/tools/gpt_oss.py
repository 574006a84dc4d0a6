"""gpt-oss's calls: messages to functions, in Harmony."""

from pdserve.gateway.text.parsing.family import CallForm, ToolFamily
from pdserve.gateway.text.parsing.harmony import (
    CHANNEL,
    FINAL,
    MESSAGE,
    SPECIAL,
    HarmonyStream,
)

_CALL = f"{CHANNEL}commentary to=functions."

FAMILY = ToolFamily(
    "gpt_oss",
    lambda template: CHANNEL in template and MESSAGE in template,
    # <|call|> ends the answer, so no grammar may ask for it as a part.
    CallForm(f"{_CALL}NAME <|constrain|>json{MESSAGE}", "", trigger=_CALL),
    special=SPECIAL,
    whole=HarmonyStream,
    opening=FINAL,
)
