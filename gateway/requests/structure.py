"""The structure that an answer's text has to match, as a client requests it; pure data."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

from pdserve.engine.api.sampling_bounds import (
    MAX_STRUCTURE_CHARS,
    MAX_STRUCTURE_DEPTH,
    MAX_STRUCTURE_VALUES,
)

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark", "grammar", "structural_tag"]


@dataclass(frozen=True, slots=True)
class Structure:
    """A form of text; `param` is the request's field that sets it.

    `value` by kind: json_schema, a schema (an object, or true); json_object, nothing; regex, its
    text; choice, a list of texts; lark, a grammar as llguidance reads it; grammar, one of Lark or
    of GBNF, as llama.cpp and XGrammar read it; structural_tag, free text with tags: {"structures":
    [{"begin", "schema", "end"}], "triggers": [texts], "required": bool, "stop_after_first": bool},
    where `required` allows only tags, at least one, white space between them, and a few characters
    behind. A structure there may have a "param" or a "path" and be "lenient" itself; if it
    "is_hidden", the client did not write its schema, so errors name no path within it. With "or",
    the fields of another structure, the text may match that one instead of having tags.

    `path`: of the schema in the request, if that is not `param`.

    `lead`: what the answer has before the form, including special tokens.

    `lenient`: of a schema, keywords that cannot be enforced bind nothing; otherwise they are
    refused. `whitespace`: JSON may have some between its tokens.
    """

    kind: Kind
    value: Any
    param: str
    lenient: bool = False
    whitespace: bool = True
    lead: str = ""
    path: str = ""

    def encoded(self) -> bytes:
        """Return the structure for the text processes; equal structures have equal bytes."""
        return json.dumps({item.name: getattr(self, item.name) for item in fields(self)}).encode()

    @classmethod
    def decoded(cls, data: bytes) -> "Structure":
        return cls(**json.loads(data))


def oversize(structure: Structure) -> str:
    """Return why a structure is too large to compile; empty if it is not. Takes about a millisecond
    at most, however large it is."""
    level: list[Any] = [[structure.value]]
    chars = num_values = 0
    for _ in range(MAX_STRUCTURE_DEPTH):
        inner: list[Any] = []
        for item in level:
            num_values += len(item)
            if num_values > MAX_STRUCTURE_VALUES:
                return f"it has more than {MAX_STRUCTURE_VALUES} values"
            values: Iterable[Any] = item
            if isinstance(item, dict):
                chars += sum(map(len, item))
                values = item.values()
            for value in values:
                if isinstance(value, str):
                    chars += len(value)
                elif isinstance(value, int):
                    chars += value.bit_length() // 3
                elif isinstance(value, dict | list):
                    inner.append(value)
        if chars > MAX_STRUCTURE_CHARS:
            return f"its texts have more than {MAX_STRUCTURE_CHARS} characters"
        if not inner:
            return ""
        level = inner
    return f"it is nested more than {MAX_STRUCTURE_DEPTH} levels deep"
