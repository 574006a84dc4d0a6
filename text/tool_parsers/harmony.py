"""Defines the tool calls of gpt-oss: messages to functions in the Harmony format."""

from pdserve.text.parsing import CallForm, HarmonyStream, ToolFamily, harmony

FAMILIES = (
    ToolFamily(
        "gpt_oss",
        harmony.is_template,
        # No end tag: <|call|> ends the answer, so a grammar must not require it.
        CallForm(
            f"{harmony.CALL}NAME <|constrain|>json{harmony.MESSAGE}", "", trigger=harmony.CALL
        ),
        special=harmony.SPECIAL,
        make_parser=HarmonyStream,
        opening=harmony.FINAL,
    ),
)
