"""Calls in <tool_calls>, of Jamba, Apriel, Hunyuan and MiniMax M1: a JSON list, or objects."""

from pdserve.text.parsing import json_between

BEGIN, END = "<tool_calls>", "</tool_calls>"

FAMILY = json_between("jamba", {BEGIN: END}, lambda template: BEGIN in template)
