"""The calls of Llama 4 and pythonic Llama 3.2: a list of Python calls or JSON objects."""

from dataclasses import replace

from pdserve.text.parsing import CallForm, python_between

BEGIN, END = "<|python_start|>", "<|python_end|>"

FAMILY = replace(
    python_between("llama4_pythonic", {BEGIN: END}, lambda t: "<|header_start|>" in t, bare="[{"),
    form=CallForm('{"name": "NAME", "parameters": ', "}", trigger='{"name": "'),
)
