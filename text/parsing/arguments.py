"""Converts tool call arguments that a model writes as plain text to JSON values, of the types in
the tools' JSON schemas; pure.

Schemas are untrusted and may refer to themselves many times. The types of an argument are therefore
looked up only when a call with it is read, once each, with a limited number of steps per request.
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
    """The JSON schemas of a request's tools. All choices of the request share it, and so the limit
    of steps to look up types."""

    def __init__(self, parameters: Mapping[str, Mapping[str, Any] | None] | None = None) -> None:
        """`parameters`: the JSON schema of a tool's arguments (None if it has none), by the tool's
        name."""
        self._parameters = parameters or {}
        self._tools: dict[str, _ArgumentTypes] = {}
        self._budget = _Budget(MAX_STEPS)

    def __contains__(self, name: str) -> bool:
        """Return whether the request has a tool of that name."""
        return name in self._parameters

    def knows(self, name: str, key: str) -> bool:
        """Return whether the request has a tool `name` whose schema has an argument `key`."""
        return self.call(name).knows(key)

    def call(self, name: str) -> "CallArguments":
        """Return a converter for the arguments of one call of the tool `name`, which need not
        exist."""
        if name not in self._parameters:
            return CallArguments(None)
        if name not in self._tools:
            self._tools[name] = _ArgumentTypes(self._parameters[name] or {}, self._budget)
        return CallArguments(self._tools[name])


class CallArguments:
    """Converts the arguments of one tool call to JSON by the tool's schema. The number of values in
    Python notation is limited per call."""

    def __init__(
        self, types: "_ArgumentTypes | None", values: "_Budget | None" = None, depth: int = 1
    ) -> None:
        """`types`: the types of the tool's arguments; None if the tool is unknown. `values`: how
        many more values in Python notation may be read. `depth`: nesting depth of the object or
        list that contains the values; 1 for the arguments object itself."""
        self._types = types
        self._depth = depth
        self._values = values or _Budget(MAX_VALUES)

    def within(self, key: str) -> "CallArguments":
        """Return a converter for the members of the argument `key` if that is an object, or for its
        items if it is a list; use the key `item` for each item."""
        types = self._types and self._types.within(key)
        return CallArguments(types, self._values, self._depth + 1)

    def may_contain(self, key: str) -> bool:
        """Return whether the schema allows an object or a list as the argument `key`."""
        types = self._allowed_types(key)
        return not types or bool(types & _CONTAINERS)

    def may_be_list(self, key: str) -> bool:
        types = self._allowed_types(key)
        return not types or "array" in types

    def must_contain(self, key: str) -> bool:
        """Return whether the schema allows only an object or a list as the argument `key`."""
        types = self._allowed_types(key)
        return bool(types) and types <= _CONTAINERS

    def knows(self, key: str) -> bool:
        """Return whether the tool's schema has the argument `key`."""
        return self._types is not None and self._types.schema(key) is not None

    def typed(self, key: str, text: str) -> Any:
        """Convert the whole text of the argument `key` to a value of a type that its schema allows.
        Returns the text itself if the schema names no type, the text fits none, or the value is
        nested too deeply."""
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
        """Yield the member `key` of the arguments object as JSON: the text `gap`, the key, a colon
        and the value. Otherwise like `value`."""
        return self.value(f"{gap}{json_text(key)}: ", key, texts, json=json)

    def value(self, head: str, key: str, texts: Pieces[T], *, json: bool = False) -> Pieces[T]:
        """Yield the value of the argument `key` as JSON text, converted from the pieces of plain
        text in `texts`; return the result of `texts`.

        The first yielded piece begins with `head`. Strings are streamed; so are objects and lists
        if the schema allows no string. Other values are yielded when they are complete. `json`:
        ignore the schema; the value is JSON if it parses, else a string. Raises CutOff if the text
        ends too early; Malformed if the value turns out to be invalid after a part of it was
        yielded.
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
        """Parse a JSON text. Raises Malformed if it is invalid or is nested too deeply within the
        arguments."""
        value = json_value(text)
        if self._depth + depth_of(value) > MAX_JSON_DEPTH:
            raise Malformed
        return value

    def _literal(self, text: str) -> Any:
        """Parse a value in Python notation, such as True or a tuple. Raises Malformed if it is
        invalid."""
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
    """Converts the text of one argument value to JSON pieces. How it does so is decided by the
    beginning of the text: "string" (streamed), "value" (an object or list, streamed; "over" after
    its last bracket or where it is malformed) or "whole" (converted when complete); "" while
    undecided.

    `is_broken`: the value is malformed after a part of it was yielded.
    """

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
        """End the value and yield the remaining JSON text. `convert` converts the whole text of a
        value that was not streamed."""
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
        """Choose the form ("string", "value" or "whole") by the beginning of the value, which has
        no leading white space; "" if more text is needed."""
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
        """Use up a number of steps; return whether as many were left."""
        self.remaining -= steps
        return self.remaining >= 0


class _ArgumentTypes:
    """The JSON type names that a tool's schema allows for each argument. The set is empty if the
    schema names no type, or if the steps left for lookups do not suffice to find them all."""

    def __init__(self, root: Mapping[str, Any], budget: _Budget, schema: Any = None) -> None:
        """`root`: the schema of the tool's arguments, in which references are resolved. `schema`:
        the schema of a nested object or list in it whose members or items are looked up; by default
        `root`."""
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
        """Return the schema of the argument `key`, or else that of additional arguments; None if
        there is neither."""
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
        """Return the allowed types of the members or items of the argument `key`."""
        if key not in self._within:
            schema = self.schema(key)
            self._within[key] = _ArgumentTypes(self._root, self._budget, schema or {})
        return self._within[key]

    def _schemas(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """Yield a schema, and all schemas that it refers to or combines by anyOf, oneOf or
        allOf."""
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
        """Return the types that the schema at a JSON pointer allows."""
        if pointer not in self._types_by_pointer:
            self._types_by_pointer[pointer] = self._reachable_types(self._target(pointer), pointer)
        return self._types_by_pointer[pointer]

    def _reachable_types(self, schema: Any, skipped_pointer: str) -> frozenset[str]:
        """Return the types that a schema allows, together with those of all schemas that it refers
        to or combines by anyOf, oneOf or allOf. References to `skipped_pointer` are not followed.
        Empty if the steps left do not suffice."""
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
        """Return the part of the tool's schema at a JSON pointer (RFC 6901); None if it does not
        exist."""
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
    """Return the JSON pointer of a schema's `$ref` into the same document; "" if the schema has
    none."""
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
