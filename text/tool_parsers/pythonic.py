"""Calls in a Python list at the start of the answer, or between tags that several families use."""

from dataclasses import replace

from pdserve.text.parsing import CallForm, python_between

_NAMES = "tool_call", "tool_calls", "function_calls"
TAGS = {f"<{name}>": f"</{name}>" for name in _NAMES}

FAMILY = replace(
    python_between("pythonic", TAGS, lambda template: False, bare="[{"),
    form=CallForm('{"name": "NAME", "arguments": ', "}", trigger='{"name": "'),
)
