"""The calls of InternLM 2: JSON after the tag of its plug-ins."""

from pdserve.text.parsing import json_between

BEGIN, END = "<|action_start|><|plugin|>", "<|action_end|>"

FAMILY = json_between(
    "internlm2", {BEGIN: END}, lambda template: "<|plugin|>" in template, arguments="parameters"
)
