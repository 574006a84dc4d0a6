"""Converts arguments in plain text to values of the types in the tools' JSON schemas; pure.

Schemas are untrusted and may refer to themselves many times. Types are therefore looked up only
when a call is read, once each, and within one budget per request.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from pdserve.text.parsing.pieces import MAX_JSON_DEPTH, JsonLiteralPieces, OpenJson, json_escaped
from pdserve.text.parsing.reader import BlockReader, CutOff, Malformed, Pieces, T
from pdserve.text.parsing.values import MAX_VALUES, depth_of, json_text, json_value

MAX_STEPS = 2048  # through the schemas of a request: about two milliseconds
MAX_OPTIONS = 32  # read of a list of alternatives in a schema
MAX_POINTER_CHARS = 256
_CHOICES = ("anyOf", "oneOf", "allOf")
_NO_TYPES: frozenset[str] = frozenset()
_STRING = frozenset({"string"})
_CONTAINERS = frozenset({"object", "array"})
_NON_STRINGS = frozenset({"object", "array", "integer", "number", "boolean", "null"})
MAX_UNDECIDED = 512  # characters of a value that may be a string or another type
MAX_STREAMED_VALUES = 1 << 20  # of an argument whose JSON is streamed
_KINDS = {"properties": "object", "additionalProperties": "object", "items": "array"}  # by keyword
_NUMERIC = frozenset("+-.0123456789eE_ \t\r\n")


class ToolSchemas:
    """The schemas of a request's tools, shared by all its choices."""

    def __init__(self, parameters: Mapping[str, Mapping[str, Any] | None] | None = None) -> None:
        """Initialize with `parameters`, the schema of the arguments by tool name."""
        self._parameters = parameters or {}
        self._tools: dict[str, _ArgumentTypes] = {}
        self._budget = _Budget(MAX_STEPS)

    def __contains__(self, name: str) -> bool:
        """Return whether a tool has that name."""
        return name in self._parameters

    def knows(self, name: str, key: str) -> bool:
        """Return whether a tool has that name and such an argument."""
        return self.call(name).knows(key)

    def call(self, name: str) -> "CallArguments":
        """Return a converter for the arguments of one call; the tool may be unknown."""
        if name not in self._parameters:
            return CallArguments(None)
        if name not in self._tools:
            self._tools[name] = _ArgumentTypes(self._parameters[name] or {}, self._budget)
        return CallArguments(self._tools[name])


class CallArguments:
    """Converts the arguments of one call, with one budget for values that are not JSON."""

    def __init__(
        self, types: "_ArgumentTypes | None", values: "_Budget | None" = None, depth: int = 1
    ) -> None:
        """Initialize with `depth` of the containing object or list; 1 for the arguments object."""
        self._types = types
        self._depth = depth
        self._values = values or _Budget(MAX_VALUES)

    def within(self, key: str) -> "CallArguments":
        """Return a converter for the members of an object argument, or for the items of a list
        argument, each under the key `item`."""
        types = self._types and self._types.within(key)
        return CallArguments(types, self._values, self._depth + 1)

    def may_contain(self, key: str) -> bool:
        """Return whether an argument may be an object or a list."""
        types = self._allowed_types(key)
        return not types or bool(types & _CONTAINERS)

    def may_be_list(self, key: str) -> bool:
        types = self._allowed_types(key)
        return not types or "array" in types

    def must_contain(self, key: str) -> bool:
        """Return whether an argument can only be an object or a list."""
        types = self._allowed_types(key)
        return bool(types) and types <= _CONTAINERS

    def knows(self, key: str) -> bool:
        """Return whether the tool has such an argument."""
        return self._types is not None and self._types.schema(key) is not None

    def typed(self, key: str, text: str) -> Any:
        """Convert a text to a value of its schema's type. Returns the text if the schema has no
        type, the text does not match it, or the value is nested too deeply."""
        types = self._allowed_types(key)
        if not types or types == {"string"}:
            return text
        bare = text.strip()
        if bare.lower() in ("null", "none") and "null" in types:
            return None
        if bare in ("True", "False") and "boolean" in types:
            return bare == "True"
        try:
            value = self._json(bare)
        except Malformed:
            if "string" in types and bare[:1] not in ("{", "[", "("):
                return text
            try:
                value = self._literal(bare)
            except Malformed:
                return text
        return value if _types_of(value) & types else text

    def member(self, gap: str, key: str, texts: Pieces[T], *, json: bool = False) -> Pieces[T]:
        """Yield a member of the arguments as JSON, preceded by `gap`; otherwise as `value`."""
        return self.value(f"{gap}{json_text(key)}: ", key, texts, json=json)

    def value(self, head: str, key: str, texts: Pieces[T], *, json: bool = False) -> Pieces[T]:
        """Yield a value of the arguments as JSON, from its text in pieces; return the result of
        `texts`.

        `head` is prepended to the first piece. Strings are streamed; so are objects and lists if
        the schema allows no string. `json`: ignore the schema; the value is JSON if it parses, else
        a string. Raises CutOff; Malformed, also after the whole text if its value is malformed.
        """

        def convert(text: str) -> Any:
            return self._json_or_text(text) if json else self.typed(key, text)

        form = _Form(_NON_STRINGS if json else self._allowed_types(key), quoted=json)
        while True:
            try:
                text = next(texts)
            except StopIteration as stop:
                if piece := head + "".join(form.end(convert)):
                    yield piece
                if form.is_broken:
                    raise Malformed from None
                result: T = stop.value
                return result
            except CutOff:
                if form.is_broken:
                    raise Malformed from None
                raise CutOff(value="" if head else "".join(form.end(convert))) from None
            if text is None:
                yield None
            elif text and (piece := head + "".join(form.push(text))):
                yield piece
                head = ""

    def _allowed_types(self, key: str) -> frozenset[str]:
        return self._types.of(key) if self._types is not None else _NO_TYPES

    def _json(self, text: str) -> Any:
        """Parse JSON. Raises Malformed if it is invalid or nested too deeply in the arguments."""
        value = json_value(text)
        if self._depth + depth_of(value) > MAX_JSON_DEPTH:
            raise Malformed
        return value

    def _literal(self, text: str) -> Any:
        """Parse a value in Python notation. Raises Malformed."""
        reader = BlockReader(f"{text}\n", ended=True)  # the line break ends a number
        literals = JsonLiteralPieces(reader, self._values.remaining)
        try:
            literal_json = "".join(piece for piece in literals.value() if piece is not None)
        finally:
            self._values.remaining = literals.values_left
        if reader.text[reader.position :].strip():
            raise Malformed
        return json.loads(literal_json)

    def _json_or_text(self, text: str) -> Any:
        try:
            return self._json(text)
        except Malformed:
            return text


class _Form:
    """The form of one value's text. Starts undecided, then becomes "string", "value" (streamed;
    "over" after its last bracket or where it is malformed) or "whole" (converted when complete).
    `is_broken`: the value is malformed after the part that was yielded."""

    def __init__(self, types: frozenset[str], *, quoted: bool) -> None:
        self._types = types
        self._quoted = quoted  # a string may be in quotes
        self._decided = "string" if types <= _STRING else ""
        self._begun = False
        self.is_broken = False
        self._texts: list[str] = []  # held back
        self._reader = BlockReader("")
        self._value: Pieces[None] | None = None
        self._output = OpenJson()

    def push(self, text: str) -> Iterator[str]:
        if not self._decided:
            self._texts.append(text)
            text = "".join(self._texts)
            self._decided = self._decision(text.lstrip())
            self._texts = [] if self._decided else [text]
        if self._decided == "string":
            yield json_escaped(text) if self._begun else f'"{json_escaped(text)}'
            self._begun = True
        elif self._decided == "value":
            self._reader.feed(text)
            yield from self._read()
        elif self._decided == "whole":
            self._texts.append(text)
        elif self._decided == "over" and text.strip():
            self.is_broken = True

    def end(self, convert: Callable[[str], Any]) -> Iterator[str]:
        """Yield the end of the value; `convert` converts its whole text."""
        if self._decided == "string":
            yield '"' if self._begun else '""'
        elif self._decided == "value":
            if self._begun:
                self._reader.feed("\n")  # ends a number
            self._reader.ended = True
            yield from self._read()
        if self._decided in ("", "whole"):
            text = "".join(self._texts)
            try:
                yield json_text(convert(text))
            except Malformed:
                yield json_text(text)

    def _decision(self, bare: str) -> str:
        """Return the form by the beginning of the value, or "" if undecided; `bare` has no leading
        white space."""
        types, first = self._types, bare[:1]
        if not first:
            return ""
        if len(bare) > MAX_UNDECIDED or (first == '"' and self._quoted):
            return "whole"
        if first in "{[(" and types & _CONTAINERS:
            streamed = ({"{": "object", "[": "array"}.get(first) in types) and "string" not in types
            return "value" if streamed else "whole"
        if first in _NUMERIC and types & {"integer", "number"}:
            return "" if set(bare) <= _NUMERIC else "string"
        words = ("true", "false") * ("boolean" in types) + ("null", "none") * ("null" in types)
        word = bare.rstrip().lower()
        return "" if any(other.startswith(word) for other in words) else "string"

    def _read(self) -> Iterator[str]:
        reader = self._reader
        if self._value is None:
            self._value = JsonLiteralPieces(reader, MAX_STREAMED_VALUES).value()
        try:
            for piece in self._value:
                if piece is None:
                    return
                self._begun = True
                self._output.push(piece)
                reader.drop_read()
                yield piece
            self._decided = "over"
            self.is_broken = bool(reader.text[reader.position :].strip())
        except Malformed as error:
            if not self._begun:
                self._texts = [reader.text]
                self._decided = "whole"
                return
            self._decided = "over"  # emitted pieces cannot be withdrawn
            if isinstance(error, CutOff):
                yield self._output.closing
            else:
                self.is_broken = True


class _Budget:
    def __init__(self, steps: int) -> None:
        self.remaining = steps

    def take(self, steps: int) -> bool:
        """Consume steps; return whether that many were left."""
        self.remaining -= steps
        return self.remaining >= 0


class _ArgumentTypes:
    """The type names allowed for each argument of one tool. Empty if the schema does not name any
    or the budget does not suffice to find them."""

    def __init__(self, root: Mapping[str, Any], budget: _Budget, schema: Any = None) -> None:
        """Initialize with the schema `root`; `schema` is that of an argument within it."""
        self._root = root
        self._budget = budget
        schemas = [*self._schemas(root if schema is None else schema)]
        members = [_mapping(schema.get("properties")) for schema in schemas]
        items = [{"item": schema["items"]} for schema in schemas if "items" in schema]
        self._members = [*items, *members]
        additional = (schema.get("additionalProperties") for schema in schemas)
        self._additional = next(
            (candidate for candidate in additional if _mapping(candidate)), None
        )
        self._types_by_key: dict[str, frozenset[str]] = {}
        self._types_by_pointer: dict[str, frozenset[str]] = {}  # by pointer
        self._within: dict[str, _ArgumentTypes] = {}

    def schema(self, key: str) -> Any:
        """Return the schema of an argument, or of additional ones; None if there is none."""
        schemas = [member[key] for member in self._members if key in member]
        if len(schemas) > 1:
            return {"anyOf": schemas}
        return schemas[0] if schemas else self._additional

    def of(self, key: str) -> frozenset[str]:
        if key not in self._types_by_key:
            schema = self.schema(key)
            if schema is None:
                return _NO_TYPES
            pointer = _pointer(schema)
            types = self._reachable_types(schema, pointer)
            self._types_by_key[key] = types | self._pointer_types(pointer) if pointer else types
        return self._types_by_key[key]

    def within(self, key: str) -> "_ArgumentTypes":
        """Return the types of the members or items of an argument."""
        if key not in self._within:
            schema = self.schema(key)
            self._within[key] = _ArgumentTypes(self._root, self._budget, schema or {})
        return self._within[key]

    def _schemas(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """Yield a schema, and all schemas that it refers to or offers as alternatives."""
        seen: set[str] = set()
        pending = [schema]
        while pending and self._budget.take(1):
            schema = pending.pop()
            if not isinstance(schema, Mapping):
                continue
            yield schema
            pending += _options(schema)
            pointer = _pointer(schema)
            if pointer and pointer not in seen:
                seen.add(pointer)
                pending.append(self._target(pointer))

    def _pointer_types(self, pointer: str) -> frozenset[str]:
        """Return the types of a pointer's target."""
        if pointer not in self._types_by_pointer:
            self._types_by_pointer[pointer] = self._reachable_types(self._target(pointer), pointer)
        return self._types_by_pointer[pointer]

    def _reachable_types(self, schema: Any, skipped_pointer: str) -> frozenset[str]:
        """Return the types of a schema and of all schemas that it refers to or offers as
        alternatives; does not follow the pointer `skipped_pointer`."""
        types: set[str] = set()
        seen = {skipped_pointer}
        pending = [schema]
        while pending:
            schema = pending.pop()
            if not isinstance(schema, Mapping):
                continue
            if not self._budget.take(1):
                return _NO_TYPES
            types |= _declared_types(schema)
            pending += _options(schema)
            pointer = _pointer(schema)
            if not pointer or pointer in seen:
                continue
            seen.add(pointer)
            if pointer in self._types_by_pointer:
                types |= self._types_by_pointer[pointer]
            else:
                pending.append(self._target(pointer))
        return frozenset(types)

    def _target(self, pointer: str) -> Any:
        """Return the target of a JSON pointer (RFC 6901), or None."""
        names = unquote(pointer).split("/")[1:]
        if not self._budget.take(len(names)):
            return None
        target: Any = self._root
        for name in names:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping):
                target = target.get(name)
            elif isinstance(target, list) and name.isascii() and name.isdigit() and len(name) < 6:
                target = target[int(name)] if int(name) < len(target) else None
            else:
                return None
        return target


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _pointer(schema: Any) -> str:
    """Return the reference of a schema into its own document; empty if it has none."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or len(reference) > MAX_POINTER_CHARS:
        return ""
    return reference if reference == "#" or reference.startswith("#/") else ""


def _options(schema: Mapping[str, Any]) -> Iterator[Any]:
    for choice in _CHOICES:
        options = schema.get(choice)
        if isinstance(options, list):
            yield from options[:MAX_OPTIONS]


def _declared_types(schema: Mapping[str, Any]) -> set[str]:
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {name for name in declared[:MAX_OPTIONS] if isinstance(name, str)}
    types: set[str] = set()
    values = schema.get("enum")
    constant = [schema["const"]] if "const" in schema else []
    for value in [*constant, *(values[:MAX_OPTIONS] if isinstance(values, list) else ())]:
        types |= {"string"} if isinstance(value, str) else _types_of(value)
    if not types:
        types |= {kind for key, kind in _KINDS.items() if key in schema}
    return types


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
    return set()  # a string in quotes is kept as written
