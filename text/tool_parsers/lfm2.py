"""The calls of LFM 2: a Python list between two tags."""

from pdserve.text.parsing import python_between

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
TEMPLATE_MARKS = "<|tool_list_start|>", BEGIN, "List of tools: ["

FAMILY = python_between(
    "lfm2", {BEGIN: END}, lambda template: any(text in template for text in TEMPLATE_MARKS)
)
