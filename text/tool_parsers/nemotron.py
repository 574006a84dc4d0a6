"""The calls of Nemotron: a JSON list in <TOOLCALL>."""

from pdserve.text.parsing import json_between

BEGIN, END = "<TOOLCALL>", "</TOOLCALL>"

FAMILY = json_between("nemotron", {BEGIN: END}, lambda template: BEGIN in template)
