"""The calls of GigaChat 3: JSON after a tag, or after the header of a message."""

from pdserve.gateway.text.parsing.tagged import json_between

BEGIN = "<|function_call|>"
HEADER = "function call<|role_sep|>"
SEPARATOR = "<|message_sep|>\n\n"

FAMILY = json_between(
    "gigachat3",
    {BEGIN: SEPARATOR, f"{SEPARATOR}{HEADER}": SEPARATOR, HEADER: SEPARATOR},
    lambda template: BEGIN in template or "<|role_sep|>" in template,
)
