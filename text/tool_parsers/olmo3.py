"""The calls of OLMo 3: Python calls, one per line, in <function_calls>."""

from pdserve.text.parsing import python_between

BEGIN, END = "<function_calls>", "</function_calls>"

FAMILY = python_between("olmo3", {BEGIN: END}, lambda template: BEGIN in template)
