"""Random satisfiable JSON schemas, from a seed.

In a finite schema an answer is sure to end: in others a small model fills an open string, number,
array or list until its tokens are spent.
"""

import random
from collections.abc import Callable
from typing import Any

NAMES = ("a", "b1", "name", "the value", 'quo"te', "é", "x/y", "~tilde", "$id2", "")
PATTERNS = ("^[a-c]{2,5}$", "^\\d{3}-\\d{2}$", "^(yes|no)$", "x+y?z*", '^[^"\\\\]{1,4}$', "^\\w+$")
# Not "time": llguidance writes a small z, as RFC 3339 permits, and jsonschema rejects it.
FORMATS = ("date", "date-time", "email", "uuid", "ipv4", "duration", "hostname")
# Nor "date" for a model's answers: llguidance has a 29 February in every year, and a year 0.
FINITE_PATTERNS, FINITE_FORMATS = PATTERNS[:3], ("uuid", "ipv4")
CONSTANTS: tuple[Any, ...] = (
    None, True, 0, -1, 2.5, "", "a b", 'q"\\', "é😀", [], [1, "x"], {}, {"k": [None]},
)  # fmt: skip
MAX_DEPTH, FINITE_DEPTH = 4, 3


class SchemaMaker:
    """Makes one schema, along with the definitions that it refers to."""

    def __init__(self, rng: random.Random, finite: bool) -> None:
        self._rng = rng
        self._finite = finite
        self._max_depth = FINITE_DEPTH if finite else MAX_DEPTH
        self._definitions: dict[str, Any] = {}

    def make(self) -> dict[str, Any]:
        schema = self._any(0)
        if self._definitions:
            schema = {**schema, "$defs": self._definitions}
        return schema

    def _any(self, depth: int) -> dict[str, Any]:
        leaves: list[Callable[[int], dict[str, Any]]] = [
            self._string, self._number, self._integer, self._word, self._choice,
        ]  # fmt: skip
        nested = [self._object, self._object, self._array, self._union, self._reference]
        kind = self._rng.choice(leaves if depth >= self._max_depth else leaves + nested * 2)
        schema = kind(depth)
        if self._chance(0.1):
            schema = {**schema, "title": "A", "description": "What it is"}
        return schema

    def _chance(self, share: float) -> bool:
        return self._rng.random() < share

    def _word(self, _: int) -> dict[str, Any]:
        return {"type": self._rng.choice(["boolean", "null", ["boolean", "null"]])}

    def _choice(self, _: int) -> dict[str, Any]:
        if self._chance(0.4):
            return {"const": self._rng.choice(CONSTANTS)}
        return {"enum": self._rng.sample(CONSTANTS, self._rng.randint(1, 6))}

    def _string(self, _: int) -> dict[str, Any]:
        patterns, formats = PATTERNS, FORMATS
        if self._finite:
            patterns, formats = FINITE_PATTERNS, FINITE_FORMATS
        match self._rng.randrange(3 if self._finite else 4):
            case 0:
                return {"type": "string", "pattern": self._rng.choice(patterns)}
            case 1:
                return {"type": "string", "format": self._rng.choice(formats)}
            case 2:
                low = self._rng.randint(0, 5)
                return {"type": "string", "minLength": low, "maxLength": low + self._below(9)}
        return {"type": "string"}

    def _below(self, most: int) -> int:
        return self._rng.randrange(most)

    def _integer(self, _: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "integer"}
        low = self._rng.randint(-500, 500)
        if self._finite or self._chance(0.5):
            schema[self._rng.choice(["minimum", "exclusiveMinimum"])] = low
        if self._finite or self._chance(0.5):
            schema[self._rng.choice(["maximum", "exclusiveMaximum"])] = low + self._below(999) + 2
        elif self._chance(0.2):
            schema["multipleOf"] = self._rng.choice([2, 5, 10])
        return schema

    def _number(self, _: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "number"}
        low = round(self._rng.uniform(-50, 50), self._below(3))
        if self._finite or self._chance(0.5):
            schema[self._rng.choice(["minimum", "exclusiveMinimum"])] = low
        if self._finite or self._chance(0.5):
            schema[self._rng.choice(["maximum", "exclusiveMaximum"])] = low + self._below(99) + 1
        if self._finite:
            schema["multipleOf"] = self._rng.choice([0.25, 0.5])
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array"}
        if self._finite or self._chance(0.8):
            schema["items"] = self._any(depth + 1)
        if self._chance(0.2):
            schema["prefixItems"] = [self._any(depth + 1) for _ in range(self._rng.randint(1, 2))]
            if self._chance(0.5):
                return {**schema, "items": False}
        low = self._below(3)
        if self._chance(0.4):
            schema["minItems"] = low
        if self._finite or self._chance(0.6):
            schema["maxItems"] = low + self._below(4)
        return schema

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._rng.sample(NAMES, self._rng.randint(0, 4))
        schema: dict[str, Any] = {"type": "object"}
        if names:
            schema["properties"] = {name: self._any(depth + 1) for name in names}
            schema["required"] = [name for name in names if self._chance(0.6)]
        match 1 if self._finite else self._rng.randrange(4):
            case 0:
                schema["additionalProperties"] = self._any(depth + 1)
            case 1 | 2:
                schema["additionalProperties"] = False
        return schema

    def _union(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._any(depth + 1) for _ in range(self._rng.randint(1, 3))]}

    def _reference(self, depth: int) -> dict[str, Any]:
        """Refer to a definition, which may refer to itself where it is optional."""
        whole = [name for name, definition in self._definitions.items() if definition]
        if not whole or self._chance(0.3):
            name = f"d{len(self._definitions)}"
            self._definitions[name] = {}  # unfinished: its own parts must not refer to it
            whole.append(name)
            if not self._finite and self._chance(0.5):
                again = {"$ref": f"#/$defs/{name}"}
                self._definitions[name] = {
                    "type": "object",
                    "properties": {
                        "v": self._any(self._max_depth),
                        "next": {"anyOf": [again, {"type": "null"}]},
                    },
                    "required": ["v"],
                    "additionalProperties": False,
                }
            else:
                self._definitions[name] = self._any(max(depth + 1, self._max_depth - 1))
        return {"$ref": f"#/$defs/{self._rng.choice(whole)}"}


def random_schema(seed: int, finite: bool = False) -> dict[str, Any]:
    return SchemaMaker(random.Random(seed), finite).make()
