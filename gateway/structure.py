"""What the text of an answer has to match, as a client asks for it; pure data."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pdserve.engine.api.sampling_bounds import (
    MAX_STRUCTURE_CHARS,
    MAX_STRUCTURE_DEPTH,
    MAX_STRUCTURE_VALUES,
)

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark", "grammar", "structural_tag"]


@dataclass(frozen=True, slots=True)
class Structure:
    """A form of text; `param` is the request's field that asks for it.

    `value` by kind: json_schema, a schema (an object, or true); json_object, nothing; regex, its
    text; choice, a list of texts; lark, a grammar as llguidance reads it; grammar, one of Lark or
    of GBNF, as llama.cpp and XGrammar read it; structural_tag, free text with tags: {"structures":
    [{"begin", "schema", "end"}], "triggers": [texts], "required": bool, "stop_after_first": bool},
    where `required` makes the text begin with one of the tags. A structure there may have a "param"
    and be "lenient" itself.

    `lenient`: of a schema, keywords that cannot be enforced bind nothing; otherwise they are
    refused. `whitespace`: JSON may have some between its tokens.
    """

    kind: Kind
    value: Any
    param: str
    lenient: bool = False
    whitespace: bool = True


def oversize(structure: Structure) -> str:
    """Why a structure is too large to be compiled; empty if it is not. Takes a millisecond
    at most, however large it is."""
    level = [structure.value]
    chars = values = 0
    for _ in range(MAX_STRUCTURE_DEPTH):
        within: list[Any] = []
        for item in level:
            for part in _parts(item):
                if isinstance(part, str):
                    chars += len(part)
                elif isinstance(part, int):
                    chars += part.bit_length() // 3
                else:
                    within.append(part)
                values += 1
                if values > MAX_STRUCTURE_VALUES:
                    return f"it has more than {MAX_STRUCTURE_VALUES} values"
        if chars > MAX_STRUCTURE_CHARS:
            return f"its texts have more than {MAX_STRUCTURE_CHARS} characters"
        if not within:
            return ""
        level = within
    return f"it is nested more than {MAX_STRUCTURE_DEPTH} levels deep"


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, str):
        yield value
