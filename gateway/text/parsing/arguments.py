"""Arguments that models write as plain text, made into values of the types that the tools' JSON
schemas give them; pure.

A schema comes from a stranger and may refer to itself a thousand times over, so types are looked up
only when a call is read, each once, and all those of a request within one budget.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from pdserve.gateway.text.parsing.reader import Malformed
from pdserve.gateway.text.parsing.values import MAX_VALUES, Literals, json_value

MAX_STEPS = 2048  # through the schemas of a request: about two milliseconds
MAX_OPTIONS = 32  # that are looked at where a schema leaves a choice
MAX_POINTER_CHARS = 256
_CHOICES = ("anyOf", "oneOf", "allOf")
_NOTHING: frozenset[str] = frozenset()


class ToolSchemas:
    """The schemas of a request's tools, which all its choices share."""

    def __init__(self, parameters: Mapping[str, Mapping[str, Any] | None] | None = None) -> None:
        """`parameters`: of each tool the schema of its arguments."""
        self._parameters = parameters or {}
        self._tools: dict[str, _ArgumentTypes] = {}
        self._budget = _Budget(MAX_STEPS)

    def __contains__(self, name: str) -> bool:
        """Whether there is a tool of that name."""
        return name in self._parameters

    def call(self, name: str) -> "CallArguments":
        """What reads the arguments of one call of a tool, which need not be known."""
        if name not in self._parameters:
            return CallArguments(None)
        if name not in self._tools:
            self._tools[name] = _ArgumentTypes(self._parameters[name] or {}, self._budget)
        return CallArguments(self._tools[name])


class CallArguments:
    """The arguments of one call, with one budget of values for those that are no JSON."""

    def __init__(self, types: "_ArgumentTypes | None") -> None:
        self._types = types
        self._values_left = MAX_VALUES

    def knows(self, key: str) -> bool:
        """Whether the tool has such an argument."""
        return self._types is not None and key in self._types.properties

    def typed(self, key: str, text: str) -> Any:
        """A value as its schema wants it; the text where it says nothing."""
        types = self._types.of(key) if self._types is not None else _NOTHING
        if not types or types == {"string"}:
            return text
        bare = text.strip()
        if bare.lower() in ("null", "none") and "null" in types:
            return None
        try:
            value = json_value(bare)
        except Malformed:
            literals = Literals(bare, max_values=self._values_left)
            try:
                value = literals.whole()
            except Malformed:
                return text
            finally:
                self._values_left -= literals.num_values
        return value if _types_of(value) & types else text


class _Budget:
    def __init__(self, steps: int) -> None:
        self._left = steps

    def take(self, steps: int) -> bool:
        """Whether there are so many left."""
        self._left -= steps
        return self._left >= 0


class _ArgumentTypes:
    """The names of the types that each argument of one tool may have; none if its schema does not
    say, or says it too far away."""

    def __init__(self, whole: Mapping[str, Any], budget: _Budget) -> None:
        named = whole.get("properties")
        self.properties: Mapping[str, Any] = named if isinstance(named, Mapping) else {}
        self._whole = whole
        self._budget = budget
        self._of: dict[str, frozenset[str]] = {}
        self._referred: dict[str, frozenset[str]] = {}  # by pointer

    def of(self, key: str) -> frozenset[str]:
        if key not in self._of:
            if key not in self.properties:
                return _NOTHING
            schema = self.properties[key]
            pointer = _pointer(schema)
            found = self._reached(schema, pointer)
            self._of[key] = found | self._referred_to(pointer) if pointer else found
        return self._of[key]

    def _referred_to(self, pointer: str) -> frozenset[str]:
        """The types of what a pointer refers to."""
        if pointer not in self._referred:
            self._referred[pointer] = self._reached(self._target(pointer), pointer)
        return self._referred[pointer]

    def _reached(self, schema: Any, known: str) -> frozenset[str]:
        """The types of a schema, and of all that it refers to or leaves a choice of; the pointer
        `known` is not followed."""
        found: set[str] = set()
        seen = {known}
        todo = [schema]
        while todo:
            schema = todo.pop()
            if not isinstance(schema, Mapping):
                continue
            if not self._budget.take(1):
                return _NOTHING
            found |= _own_types(schema)
            todo += _options(schema)
            pointer = _pointer(schema)
            if not pointer or pointer in seen:
                continue
            seen.add(pointer)
            if pointer in self._referred:
                found |= self._referred[pointer]
            else:
                todo.append(self._target(pointer))
        return frozenset(found)

    def _target(self, pointer: str) -> Any:
        """What a JSON pointer (RFC 6901) refers to; None for nothing."""
        names = unquote(pointer).split("/")[1:]
        if not self._budget.take(len(names)):
            return None
        found: Any = self._whole
        for name in names:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping):
                found = found.get(name)
            elif isinstance(found, list) and name.isascii() and name.isdigit() and len(name) < 6:
                found = found[int(name)] if int(name) < len(found) else None
            else:
                return None
        return found


def _pointer(schema: Any) -> str:
    """The reference of a schema into its own document; empty if it is none."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or len(reference) > MAX_POINTER_CHARS:
        return ""
    return reference if reference == "#" or reference.startswith("#/") else ""


def _options(schema: Mapping[str, Any]) -> Iterator[Any]:
    for choice in _CHOICES:
        options = schema.get(choice)
        if isinstance(options, list):
            yield from options[:MAX_OPTIONS]


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {name for name in given[:MAX_OPTIONS] if isinstance(name, str)}
    found: set[str] = set()
    values = schema.get("enum")
    for value in values[:MAX_OPTIONS] if isinstance(values, list) else ():
        found |= {"string"} if isinstance(value, str) else _types_of(value)
    return found


def _types_of(value: Any) -> set[str]:
    match value:
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case list():
            return {"array"}
        case dict():
            return {"object"}
        case None:
            return {"null"}
    return set()  # a string in quotes is given as it is written
