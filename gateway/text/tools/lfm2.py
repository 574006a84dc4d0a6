"""The calls of LFM 2: a Python list between two tags."""

from pdserve.gateway.text.parsing.tagged import python_between

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"

FAMILY = python_between(
    "lfm2", {BEGIN: END}, lambda template: "<|tool_list_start|>" in template or BEGIN in template
)
