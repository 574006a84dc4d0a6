"""What the text of an answer has to match, as a client asks for it; pure data."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Structure:
    """A form of text; `param` is the request's field that asks for it.

    `value` by kind: json_schema, a schema (an object, or true); json_object, nothing; regex, its
    text; choice, a list of texts; lark, a grammar as llguidance reads it; grammar, one of Lark or
    of GBNF, as llama.cpp and XGrammar read it; structural_tag, free text with tags: {"structures":
    [{"begin", "schema", "end"}], "triggers": [texts], "required": bool, "stop_after_first": bool},
    where `required` makes the text begin with one of the tags. A structure there may name a "param"
    of its own.

    `lenient`: of a schema, keywords that cannot be enforced bind nothing; otherwise they are
    refused. `whitespace`: JSON may have some between its tokens.
    """

    kind: Literal[
        "json_schema", "json_object", "regex", "choice", "lark", "grammar", "structural_tag"
    ]
    value: Any
    param: str
    lenient: bool = False
    whitespace: bool = True
