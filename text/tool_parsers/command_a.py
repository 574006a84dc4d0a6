"""The calls of Command R7B and Command A: a JSON list between the tags of actions."""

from pdserve.text.parsing import json_between

BEGIN, END = "<|START_ACTION|>", "<|END_ACTION|>"

FAMILY = json_between(
    "command_a",
    {BEGIN: END},
    lambda template: BEGIN in template,
    key="tool_name",
    arguments="parameters",
)
