"""What the text of an answer has to match, as a client asks for it; pure data."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Structure:
    """A form of text; `param` is the request's field that asks for it.

    `value` by kind: json_schema, a schema (an object, or true); json_object, nothing; regex, its
    text; choice, a list of texts; lark, a grammar as llguidance reads it; structural_tag, free text
    with tags: {"structures": [{"begin", "schema", "end"}], "triggers": [texts], "required": bool,
    "stop_after_first": bool}, where `required` makes the text begin with one of the tags.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark", "structural_tag"]
    value: Any
    param: str
