"""Answers of models, through every parser of calls and reasoning.

However an answer is cut into pieces, its parts are the same, and its calls have JSON objects as
arguments.
"""

import json
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from builders.tool_answers import TOOL_ANSWERS

from pdserve.text import AnswerFormat, ContentPart, calls_of, reasoning_of, text_of
from pdserve.text.parsing import ToolSchemas
from pdserve.text.reasoning import reasoning_family, reasoning_parser_names
from pdserve.text.tool_parsers import tool_family, tool_parser_names

MAX_PIECES = 16
ODD = (
    "```", "\n", " ", "{", "}", '"', "'", "\\", "[", "]", "(", ")", "<", "|", ":", ",", "\0", "é",
    "1e999", "null", '{"a": ', "\ud7ff", "😀", "=", "/>",
)  # fmt: skip


class Fuzzed:
    def __init__(self, folder: Path) -> None:
        self._tools = [tool_family(name) for name in tool_parser_names()]
        self._reasoning = [None, *map(reasoning_family, reasoning_parser_names())]
        self._pieces = [*ODD]
        for family in (*self._tools, *self._reasoning):
            self._pieces += family.special if family is not None else ()
        for answer in TOOL_ANSWERS.values():
            self._pieces += [answer.call, answer.calls, answer.cut]

    def case(self, rng: Random) -> str:
        pieces = [rng.choice(self._pieces) for _ in range(rng.randrange(MAX_PIECES))]
        text = "".join(piece[rng.randrange(len(piece)) :] if rng.random() < 0.2 else piece
                       for piece in pieces)  # fmt: skip
        form = AnswerFormat(
            rng.choice(self._tools),
            rng.choice(self._reasoning),
            ToolSchemas(_schemas(rng)),
            parallel=rng.random() < 0.8,
            only_calls=rng.random() < 0.2,
            calls_first=rng.random() < 0.2,
            open=rng.random() < 0.3,
            continues=rng.random() < 0.2,
        )
        whole = _summary(_parsed(form, [text]))
        cut = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
        borders = [0, *cut, len(text)]
        parts = [text[a:b] for a, b in pairwise(borders)]
        assert _summary(_parsed(form, parts)) == whole, (form, text, cut)
        assert _summary(_parsed(form, list(text))) == whole, (form, text)
        answer, thought, calls = whole
        if calls:
            return "calls" if all(_is_object(arguments) for _, arguments in calls) else "begun"
        return "thoughts" if thought else "text" if answer else "nothing"


def _is_object(text: str) -> bool:
    """Return whether the arguments are complete: those of an unfinished call may end anywhere."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _schemas(rng: Random) -> dict[str, dict[str, Any] | None]:
    """Return the schemas of the function that most answers call, which may be unknown."""
    return rng.choice(({}, {"get_weather": None}, {"get_weather": _schema(rng, 3)}))


def _schema(rng: Random, depth: int) -> dict[str, Any]:
    kinds = ("string", "integer", "number", "boolean", "null", "array", "object", "odd")
    made: dict[str, Any] = {"type": rng.choice((*kinds, list(rng.sample(kinds, 2)), 7))}
    if depth and rng.random() < 0.8:
        within = {
            name: _schema(rng, depth - 1) for name in ("city", "days", "a") if rng.random() < 0.6
        }
        made |= rng.choice((
            {"type": "object", "properties": within}, {"properties": within}, {"items": made},
            {"anyOf": list(within.values())}, {"$ref": "#/$defs/A", "$defs": {"A": made}},
            {"$ref": "#"}, {"enum": ["Paris", 1, None]}, {"properties": 7},
        ))  # fmt: skip
    return made


def _parsed(form: AnswerFormat, pieces: list[str]) -> list[ContentPart]:
    parser = form.parser()
    assert parser is not None
    return [part for piece in pieces for part in parser.push(piece)] + parser.finish()


def _summary(content: list[ContentPart]) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [(call.name, call.arguments) for call in calls_of(content)]
    return text_of(content), reasoning_of(content), calls
