"""Rewrites JSON schemas to the keywords that llguidance can compile, and finds the part of a schema
that it cannot compile. Pure."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from sys import float_info
from typing import Any
from urllib.parse import unquote, urljoin

from pdserve.text.errors import TextError

# White space between two JSON tokens: one space, or a line break and the next line's indentation.
# The bound keeps a model from writing white space forever.
WHITESPACE = r"\x20?|\n\x20{0,20}|\n\t{0,8}"

# Keywords by what their value holds: a schema, a list of them, or schemas by name.
_SCHEMA_KEYWORDS = (
    "additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames",
    "additionalItems", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly",
     "writeOnly", "contentEncoding", "contentMediaType", "contentSchema", "$vocabulary",
     "$dynamicAnchor", "$recursiveAnchor")
)  # fmt: skip
# Formats that llguidance enforces. In JSON Schema, format is only an annotation.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_TYPES = frozenset(("string", "number", "integer", "boolean", "array", "object", "null"))
# Type names of Python and of Gemini clients; None: any value.
_OTHER_TYPES = {
    "str": "string", "float": "number", "double": "number", "int": "integer", "long": "integer",
    "bool": "boolean", "list": "array", "tuple": "array", "dict": "object", "any": None,
    "file": "string", "none": "null",
}  # fmt: skip
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OF_TEXT = ("type", "format", "pattern", "minLength", "maxLength", "enum", "const")
_COUNTS = frozenset(
    ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
)
# Keywords with a value of their own, in which tools of all kinds deviate from JSON Schema.
_LEAVES = frozenset(
    ("type", "required", "enum", "pattern", "multipleOf", "$id", *_BOUNDS, *_COUNTS)
)
# Keywords that llguidance lacks, by the type of the values that they constrain.
_OF_TYPE = {
    "uniqueItems": "array",
    "contains": "array",
    "unevaluatedItems": "array",
    "propertyNames": "object",
    "dependentRequired": "object",
    "dependentSchemas": "object",
    "unevaluatedProperties": "object",
}
_IN_PLACE = frozenset(
    ("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
)
_PLAIN_NAME = re.compile(r"[\w$-]+")
MAX_FLOATS = (3.4028234663852886e38, float_info.max)  # as bounds: the type has 32 or 64 bits
MAX_REPEATED_CHARS = 4096  # of a schema that is written for each of several names
MAX_REFS = 8  # length of a chain of references
MAX_DIGITS = 8  # of an index in a reference

_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*\])")
# Reasons of llguidance by their beginning, in clearer words.
_REASONS = (
    ("Unimplemented keys", "this keyword cannot be enforced"),
    ("oneOf", "it can be enforced only for schemas that exclude each other"),
)

ReasonOf = Callable[[Mapping[str, Any]], str]  # why a schema cannot be compiled; empty: it can


def guided(schema: Any, *, lenient: bool, whitespace: bool) -> dict[str, Any]:
    """Return the schema with the llguidance options of the server; options from the client are
    removed. Raises TextError if the schema is neither an object nor true."""
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


def enforceable(schema: Any, max_keywords: int) -> Any:
    """Return a copy of a schema that means the same and, as far as possible, uses only keywords
    that llguidance can compile.

    The copy lacks keywords that constrain nothing. An inner `not: {}` becomes false; a oneOf whose
    alternatives exclude each other becomes anyOf. A schema with more than `max_keywords` keywords
    is returned unchanged.
    """
    (copy,) = without_annotations([schema], max_keywords)
    if copy is schema or not isinstance(copy, dict):
        return copy
    for _, inner in reversed(list(_subschemas(copy))):  # inner ones first
        if "propertyNames" in inner:
            _name_properties(inner, _resolved(inner["propertyNames"], copy))
        if "anyOf" not in inner and _are_disjoint(inner.get("oneOf"), copy):
            inner["anyOf"] = inner.pop("oneOf")
    return copy


def _name_properties(schema: dict[str, Any], names: Any) -> None:
    """Remove the keyword `propertyNames` where that is possible: if its schema `names` allows every
    name, or, in a schema without `properties`, by listing the few names that it allows as
    properties."""
    if _is_any_text(names):
        del schema["propertyNames"]
        return
    allowed = names.get("enum") if isinstance(names, Mapping) else None
    if not isinstance(allowed, list) or not _is_any_text({**names, "enum": None}):
        return
    if {"properties", "patternProperties", "$ref"} & schema.keys():
        return
    value = schema.get("additionalProperties", True)
    if len(json.dumps(value)) * len(allowed) > MAX_REPEATED_CHARS:
        return
    del schema["propertyNames"]
    schema["properties"] = {name: value for name in allowed if isinstance(name, str)}
    schema["additionalProperties"] = False


def without_annotations(schemas: Sequence[Any], max_keywords: int) -> list[Any]:
    """Return copies of schemas without the keywords that constrain nothing, such as descriptions,
    which are often most of a schema's text. If the schemas have more than `max_keywords` keywords
    together, returns them unchanged."""
    pending: list[tuple[Mapping[str, Any], dict[str, Any]]] = []

    def start_copy(schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        pending.append((schema, {}))
        return pending[-1][1]

    def copy_schema(schema: Any) -> Any:
        matches_nothing = (
            isinstance(schema, Mapping) and set(schema) == {"not"} and _is_any(schema["not"])
        )
        return False if matches_nothing else start_copy(schema)

    copies = [start_copy(schema) for schema in schemas]
    num_keywords = 0
    while pending:
        schema, copy = pending.pop()
        num_keywords += len(schema)
        if num_keywords > max_keywords:
            return list(schemas)
        for key, value in _effective_keywords(schema).items():
            copy[key] = value
            if key in _MAP_KEYWORDS and isinstance(value, Mapping):
                copy[key] = {name: copy_schema(item) for name, item in value.items()}
            elif key in _LIST_KEYWORDS and isinstance(value, list):
                copy[key] = [copy_schema(item) for item in value]
            elif key in _SCHEMA_KEYWORDS:
                copy[key] = copy_schema(value)
    return copies


def _effective_keywords(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of one schema that constrain values, in the form that llguidance reads;
    inner schemas are not changed."""
    keywords = {
        key: value
        for key, value in schema.items()
        if key not in _ANNOTATIONS and (value is not None or key == "const")
    }
    for key in _COUNTS & keywords.keys():
        if isinstance(keywords[key], float) and keywords[key].is_integer():
            keywords[key] = int(keywords[key])
    for key, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(keywords.get(key), bool):
            # In draft 4, this keyword says that the other bound is exclusive.
            exclusive = keywords.pop(key)
            if exclusive and bound in keywords:
                keywords[key] = keywords.pop(bound)
    if "unevaluatedProperties" in keywords and not _IN_PLACE & keywords.keys():
        keywords.setdefault("additionalProperties", keywords.pop("unevaluatedProperties"))
    if "unevaluatedItems" in keywords and not (_IN_PLACE | {"contains"}) & keywords.keys():
        rest = "additionalItems" if isinstance(keywords.get("items"), list) else "items"
        keywords.setdefault(rest, keywords.pop("unevaluatedItems"))
    for key in [key for key in keywords if _has_no_effect(key, keywords)]:
        del keywords[key]
    return keywords


def _has_no_effect(key: str, schema: Mapping[str, Any]) -> bool:
    value = schema[key]
    types = schema.get("type")
    if key in _OF_TYPE and isinstance(types, str | list) and _OF_TYPE[key] not in types:
        return True
    match key:
        case "minimum" | "exclusiveMinimum":
            return isinstance(value, float) and -value in MAX_FLOATS
        case "maximum" | "exclusiveMaximum":
            return isinstance(value, float) and value in MAX_FLOATS
        case "format":
            return not (isinstance(value, str) and value in FORMATS)
        case "uniqueItems":
            return value is False
        case "not":
            return value is False
        case "additionalItems":
            return not isinstance(schema.get("items"), list)
        case "contains":
            return schema.get("minContains") == 0 and "maxContains" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema or _has_no_effect("contains", schema)
        case "if":
            return _is_any(schema.get("then", True)) and _is_any(schema.get("else", True))
        case "then" | "else":
            return "if" not in schema or _has_no_effect("if", schema)
        case "propertyNames":
            return _is_any(value) or _is_any_text(value)
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            values = value.values() if isinstance(value, Mapping) else [value]
            return all(item == [] or _is_any(item) for item in values)
        case "unevaluatedProperties" | "unevaluatedItems":
            return _is_any(value)
    return False


def _is_any(schema: Any) -> bool:
    """Return whether a schema clearly allows every value: it is true or has only annotations."""
    return schema is True or (isinstance(schema, Mapping) and _ANNOTATIONS.issuperset(schema))


def _is_any_text(schema: Any) -> bool:
    """Return whether a schema clearly allows every string."""
    if not isinstance(schema, Mapping):
        return False
    types = schema.get("type", "string")
    annotations = ("type", "format", *_ANNOTATIONS)
    rest = {key: value for key, value in schema.items() if key not in annotations}
    if rest.get("minLength") == 0:
        del rest["minLength"]
    if rest.get("enum", 0) is None:
        del rest["enum"]
    return not rest and (types == "string" or (isinstance(types, list) and "string" in types))


def _are_disjoint(options: Any, root: Mapping[str, Any]) -> bool:
    """Return whether the schemas exclude each other, so that no value matches two of them: they
    have different types, or each requires a different constant for the same property, as in a
    discriminated union. References are resolved in `root`."""
    if not isinstance(options, list) or not options:
        return False
    options = [_resolved(option, root) for option in options]
    types = [_types(option) for option in options]
    objects = [option for option, names in zip(options, types, strict=True) if names == {"object"}]
    if len(objects) > 1 and not _have_distinct_constants(objects, root):
        return False
    counts = Counter(name for names in types if names != {"object"} for name in names)
    counts["object"] += bool(objects)
    return all(types) and max(counts.values()) == 1


def _types(schema: Any) -> set[str]:
    """Return the types that a schema names, with "integer" as "number"; empty if it names none."""
    declared = schema.get("type") if isinstance(schema, Mapping) else None
    names = [declared] if isinstance(declared, str) else declared
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return set()
    return {"number" if name == "integer" else name for name in names}


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Replace a schema that is a reference by its target, through at most MAX_REFS references."""
    for _ in range(MAX_REFS):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            break
        schema = _target(schema["$ref"], root)
    return schema


def _have_distinct_constants(options: Sequence[Any], root: Mapping[str, Any]) -> bool:
    tags = [_constants(option, root) for option in options]
    for name in tags[0]:
        if all(name in constants for constants in tags):
            values = [constant for constants in tags for constant in constants[name]]
            if len(values) == len(set(values)):
                return True
    return False


def _constants(schema: Any, root: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the allowed constants (const or enum, as JSON) of each required property, by its
    name."""
    schema = _resolved(schema, root)
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        return {}
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return {}
    constants: dict[str, set[str]] = {}
    for name in required:
        property_schema = properties.get(name) if isinstance(name, str) else None
        if isinstance(property_schema, Mapping) and "const" in property_schema:
            constants[name] = {json.dumps(property_schema["const"], sort_keys=True)}
        elif isinstance(property_schema, Mapping) and isinstance(property_schema.get("enum"), list):
            constants[name] = {
                json.dumps(value, sort_keys=True) for value in property_schema["enum"]
            }
    return constants


def _target(reference: Any, root: Mapping[str, Any]) -> Any:
    """Return the part of the schema `root` at which a reference points; None if it does not
    exist."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    target: Any = root
    for part in reference[2:].split("/"):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list):
            index = int(name) if name.isdecimal() and len(name) < MAX_DIGITS else len(target)
            target = target[index] if index < len(target) else None
        else:
            target = target.get(name) if isinstance(target, Mapping) else None
    return target


def without_faults(schema: Any, reason_of: ReasonOf, *, lenient: bool) -> Any:
    """Return a copy of a schema without its valid parts that llguidance cannot compile; the rest is
    still enforced. If not `lenient`, only unknown dialects and formats are removed. `reason_of`
    tells why a schema cannot be compiled."""
    if not isinstance(schema, Mapping):
        return schema
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    inners = [inner for _, inner in _subschemas(copy)]
    if lenient:
        _drop_keywords(copy, inners, reason_of)
    _drop_annotations(copy, inners, reason_of)
    return copy


def _drop_keywords(
    root: Mapping[str, Any], inners: Sequence[dict[str, Any]], reason_of: ReasonOf
) -> None:
    """Remove keywords that cannot be compiled from the schemas `inners`, which are all schemas
    within `root`."""
    for inner in inners:
        _drop_malformed(inner)
    documents = {_document(root, inner.get("$id")) for inner in inners} - {""}
    anchors = [inner.get("$anchor") for inner in inners]
    for inner in inners:
        if "type" in inner:
            _rename_types(inner)
        for key in _LEAVES & inner.keys():
            problem = reason_of(
                {"type": "number", key: inner[key]} if key in _BOUNDS else {key: inner[key]}
            )
            if problem and not problem.startswith("Unsatisfiable"):
                del inner[key]
        reference = inner.get("$ref")
        if isinstance(reference, str):
            document, _, fragment = reference.partition("#")
            if document and _document(root, document) not in documents:
                if reason_of({"$ref": reference}):  # external documents are not fetched
                    del inner["$ref"]
            elif fragment and fragment[0] != "/" and fragment not in anchors:
                del inner["$ref"]
        patterns = inner.get("patternProperties")
        if isinstance(patterns, Mapping):
            _drop_patterns(inner, patterns, reason_of)
    for _, inner in _dangling(root):
        del inner["$ref"]
    if reason_of(root).startswith("circular"):  # caused by references with sibling keywords
        for inner in inners:
            if "$ref" in inner:
                for key in inner.keys() - {"$ref", "$defs", "definitions"}:
                    del inner[key]


def _drop_malformed(schema: dict[str, Any]) -> None:
    """Remove keywords of a schema whose value should be a schema, a list or an object of schemas
    and is not, e.g. `properties: []`, as PHP writes it."""
    for key in schema.keys() & {*_SCHEMA_KEYWORDS, *_LIST_KEYWORDS, *_MAP_KEYWORDS}:
        value = schema[key]
        if key in _MAP_KEYWORDS and isinstance(value, Mapping):
            schema[key] = {name: item if _is_schema(item) else {} for name, item in value.items()}
        elif key in _LIST_KEYWORDS and isinstance(value, list):
            schema[key] = [item if _is_schema(item) else {} for item in value]
        elif not (key in _SCHEMA_KEYWORDS and _is_schema(value)):
            del schema[key]


def _is_schema(value: Any) -> bool:
    return isinstance(value, bool | Mapping)


def _rename_types(schema: dict[str, Any]) -> None:
    """Replace type names of other languages, such as "str", by those of JSON Schema; remove `type`
    if one of its names means any value."""
    is_list = isinstance(schema["type"], list)
    names = [_type_name(name) for name in (schema["type"] if is_list else [schema["type"]])]
    if None in names:
        del schema["type"]
    else:
        schema["type"] = names if is_list else names[0]


def _type_name(name: Any) -> Any:
    """Return the JSON Schema name of a type; None if it means any value, an unknown name
    unchanged."""
    lower = name.lower() if isinstance(name, str) else name
    if not isinstance(lower, str):
        return name
    return _OTHER_TYPES.get(lower, lower if lower in _TYPES else name)


def _dangling(root: Any) -> list[tuple[str, Any]]:
    """Return (path, schema) of each schema within `root` whose reference into its document points
    at nothing. A schema with `$id` is a separate document."""
    documents = {"": root}
    dangling = []
    for path, inner in _subschemas(root):
        if isinstance(schema_id := inner.get("$id"), str) and schema_id[:1] != "#":
            documents[path] = inner
        nearest_path = max(
            (document_path for document_path in documents if _is_within(path, document_path)),
            key=len,
        )
        reference = inner.get("$ref")
        is_pointer = isinstance(reference, str) and reference.startswith("#/")
        if is_pointer and _target(reference, documents[nearest_path]) is None:
            dangling.append((path, inner))
    return dangling


def _is_within(path: str, outer: str) -> bool:
    return path.startswith(outer) and path[len(outer) : len(outer) + 1] in ("", ".", "[")


def _document(root: Mapping[str, Any], reference: Any) -> str:
    """Return the address of the document to which a reference points, relative to the `$id` of
    `root`; "" if it names none."""
    base = root.get("$id")
    try:
        address = urljoin(base, reference) if isinstance(base, str) else reference
        return address.partition("#")[0] if isinstance(address, str) else ""
    except (TypeError, ValueError):
        return ""


def _drop_annotations(
    root: Mapping[str, Any], inners: Sequence[dict[str, Any]], reason_of: ReasonOf
) -> None:
    """Remove unknown dialects (`$schema`), and formats that no text can match together with the
    schema's other keywords."""
    for inner in inners:
        if "$schema" in inner and reason_of({"$schema": inner["$schema"]}):
            del inner["$schema"]
        keywords = {key: inner[key] for key in _OF_TEXT if key in inner}
        if "format" in inner and reason_of(keywords):
            del keywords["format"]
            if not reason_of(keywords):
                del inner["format"]
    if reason_of(root):  # possibly due to formats in other subschemas than the keywords
        formats = [(inner, inner.pop("format")) for inner in inners if "format" in inner]
        if reason_of(root):
            for inner, form in formats:
                inner["format"] = form


def _drop_patterns(
    schema: dict[str, Any], patterns: Mapping[str, Any], reason_of: ReasonOf
) -> None:
    """Remove `patternProperties` whose pattern cannot be compiled, or all of them if they overlap.
    Properties whose pattern is removed may then have any value."""
    remaining = {
        name: item for name, item in patterns.items() if not reason_of(_with_patterns([name]))
    }
    if reason_of(_with_patterns(remaining)):
        remaining = {}
    if len(remaining) == len(patterns):
        return
    schema["patternProperties"] = remaining
    schema.pop("additionalProperties", None)


def _with_patterns(names: Iterable[str]) -> dict[str, Any]:
    return {"type": "object", "patternProperties": {name: {} for name in names}}


def fault(schema: Any, reason_of: ReasonOf) -> tuple[str, str]:
    """Return the path of the innermost part of a schema that cannot be compiled, and the reason;
    both are "" if the schema can be compiled. `reason_of` tells why a schema cannot be compiled."""
    for path, _ in _dangling(schema):
        return f"{path}.$ref", "the target of the reference does not exist"
    root = schema
    path, reason = "", reason_of(schema) if isinstance(schema, Mapping) else ""
    descends = bool(reason)
    while descends:
        descends = False
        for step, part in _parts(schema):
            problem = reason_of({**_definitions(root), **part}) if isinstance(part, Mapping) else ""
            # A reference to another place than a definition has no target in the part alone.
            if problem and not problem.startswith("Pointer"):
                path, schema, reason, descends = path + step, part, problem, True
                break
    if not reason:
        return "", ""
    keyword = _keyword_at_fault(schema, reason, reason_of)
    for prefix, text in _REASONS:
        if reason.startswith(prefix):
            reason = text
    return path + keyword, reason


def _keyword_at_fault(schema: Mapping[str, Any], reason: str, reason_of: ReasonOf) -> str:
    """Return the path, within a schema that does not compile, of the one keyword without which it
    compiles; "" if there is no such keyword."""
    patterns = schema.get("patternProperties")
    for name in patterns if isinstance(patterns, Mapping) else ():
        if reason_of(_with_patterns([name])):
            return f".patternProperties{_step(name)}"
    unimplemented = _UNIMPLEMENTED.search(reason)
    if unimplemented:
        return f".{json.loads(unimplemented[1])[0]}"
    for keyword in sorted(schema, key=lambda key: (key == "type", key in _MAP_KEYWORDS)):
        if not reason_of({key: value for key, value in schema.items() if key != keyword}):
            return f".{keyword}"
    return ""


def _definitions(root: Any) -> dict[str, Any]:
    return {key: root[key] for key in ("$defs", "definitions") if key in root}


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (path, schema) of the schemas directly within a schema, definitions first; paths are
    relative to the schema."""
    for key in sorted(schema, key=lambda key: key not in ("$defs", "definitions")):
        value, base_path = schema[key], f".{key}"
        if key in _MAP_KEYWORDS and isinstance(value, Mapping):
            yield from ((base_path + _step(name), subschema) for name, subschema in value.items())
        elif key in _LIST_KEYWORDS and isinstance(value, list):
            yield from (
                (f"{base_path}[{index}]", subschema) for index, subschema in enumerate(value)
            )
        elif key in _SCHEMA_KEYWORDS:
            yield base_path, value


def _subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, schema) of a schema and of all schemas within it that are objects."""
    pending = [("", schema)]
    while pending:
        path, schema = pending.pop()
        if not isinstance(schema, Mapping):
            continue
        yield path, schema
        pending += reversed([(path + step, part) for step, part in _parts(schema)])


def _step(name: str) -> str:
    """Write a property name as one step of a path: `.name`, or `["name"]` for unusual names."""
    return f".{name}" if _PLAIN_NAME.fullmatch(name) else f"[{json.dumps(name)}]"
