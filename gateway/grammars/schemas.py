"""JSON schemas as llguidance compiles them, and where in one a keyword stands. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pdserve.gateway.text.errors import TextError

# Between two tokens of JSON at most once: a space, or a line break and the next line's indentation.
# A model that would write spaces forever goes on with the JSON instead.
WHITESPACE = r"\x20?|\n\x20{0,20}|\n\t{0,8}"

# Keywords by what their value holds: a schema, a list of them, or schemas by name.
_ONE = ("additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames",
        "additionalItems", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly",
     "writeOnly")
)  # fmt: skip


def guided(schema: Any, *, lenient: bool, whitespace: bool) -> dict[str, Any]:
    """The schema with our options for llguidance in it; a client's are dropped. Raises TextError
    for what is no schema of an answer."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise TextError("a JSON schema must be an object")
    options: dict[str, Any] = {"lenient": lenient}
    if whitespace:
        options["whitespace_pattern"] = WHITESPACE
    else:
        options["whitespace_flexible"] = False
    return {**schema, "x-guidance": options}


def without_annotations(schemas: Sequence[Any], most: int) -> list[Any]:
    """Copies without keywords that bind nothing, which are most of many schemas' text; what has
    more than `most` keywords in all is given back as it is."""
    todo: list[tuple[Mapping[str, Any], dict[str, Any]]] = []

    def copied(schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        todo.append((schema, {}))
        return todo[-1][1]

    made = [copied(schema) for schema in schemas]
    seen = 0
    while todo:
        schema, copy = todo.pop()
        seen += len(schema)
        if seen > most:
            return list(schemas)
        for key, value in schema.items():
            if key in _ANNOTATIONS:
                continue
            copy[key] = value
            if key in _NAMED and isinstance(value, Mapping):
                copy[key] = {name: copied(one) for name, one in value.items()}
            elif key in _SEVERAL and isinstance(value, list):
                copy[key] = [copied(one) for one in value]
            elif key in _ONE:
                copy[key] = copied(value)
    return made


def where(schema: Any, keyword: str, value: Any = None) -> str:
    """The JSON pointer of the first subschema that has the keyword (with that value, if it is not
    None), such as "#/properties/a"; empty if none has."""
    for path, found in _subschemas(schema):
        if keyword in found and value in (None, found[keyword]):
            return path
    return ""


def _subschemas(schema: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    todo = [("#", schema)]
    while todo:
        path, schema = todo.pop()
        if not isinstance(schema, Mapping):
            continue
        yield path, schema
        inner: list[tuple[str, Any]] = []
        for key, value in schema.items():
            at = f"{path}/{key}"
            if key in _NAMED and isinstance(value, Mapping):
                inner += [(f"{at}/{_escaped(name)}", one) for name, one in value.items()]
            elif key in _SEVERAL and isinstance(value, list):
                inner += [(f"{at}/{index}", one) for index, one in enumerate(value)]
            elif key in _ONE:
                inner.append((at, value))
        todo += reversed(inner)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
