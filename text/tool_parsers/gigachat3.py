"""The calls of GigaChat 3: JSON after a tag, or after the header of a message."""

from dataclasses import replace

from pdserve.text.parsing import json_between

BEGIN = "<|function_call|>"
HEADER = "function call<|role_sep|>"
MESSAGE_END = "<|message_sep|>"
SEPARATOR = f"{MESSAGE_END}\n\n"

FAMILY = replace(
    json_between(
        "gigachat3",
        {BEGIN: SEPARATOR, f"{SEPARATOR}{HEADER}": SEPARATOR, HEADER: SEPARATOR},
        lambda template: BEGIN in template or "<|role_sep|>" in template,
    ),
    around=(SEPARATOR, MESSAGE_END),
)
