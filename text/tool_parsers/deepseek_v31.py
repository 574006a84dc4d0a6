"""The calls of DeepSeek V3.1: as V3's, without a fence."""

from dataclasses import replace

from pdserve.text.parsing import CallForm
from pdserve.text.tool_parsers import deepseek_v3
from pdserve.text.tool_parsers.deepseek_v3 import BEGIN, CALL, CALL_END, END, FENCED, SEPARATOR

FAMILY = replace(
    deepseek_v3.FAMILY,
    name="deepseek_v31",
    matches=lambda template: BEGIN in template and FENCED not in template,
    form=CallForm(f"{BEGIN}{CALL}NAME{SEPARATOR}", f"{CALL_END}{END}", trigger=BEGIN),
)
