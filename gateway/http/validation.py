"""Validation of request bodies for all APIs: strict types, errors for known fields that a route
does not serve, and the error texts."""

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from pdserve.gateway.http.fields import (
    REFUSED_TYPE,
    SERVED_TYPE,
    EntryTypes,
    Handling,
    is_neutral,
    log_unsupported,
)
from pdserve.gateway.sampling import refuse
from pdserve.services.common.errors import MAX_QUOTED, ServiceError, cut, quoted
from pdserve.text import Tool

log = logging.getLogger("pdserve.gateway.http")

MAX_FIELDS = 1024  # of a body, including unknown ones
MAX_TOOLS = 1024
MAX_SCHEMA_DEPTH = 32
MAX_SCHEMA_VALUES = 4096  # of one tool
MAX_SCHEMA_CHARS = 1 << 16
MAX_TOOLS_VALUES = 1 << 16  # of the schemas of a request's tools
MAX_TOOLS_CHARS = 1 << 20  # of their schemas and descriptions
MAX_LOGGED_NAMES = 20  # unknown fields named in the log
OBJECT_TYPES = ("object", "dict", "any")  # also as Python and Gemini clients write it


def _text_or_objects(value: Any) -> Any:
    if isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(item, dict) for item in value)
    ):
        return value
    raise ValueError("must be a string or a list of objects")


TextOrObjects = Annotated[
    Any,
    AfterValidator(_text_or_objects),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]
"""A field that is a text, or a list of objects, whose contents are checked later."""


Priority = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
"""The priority of a request among those of its client: a lower value runs first; 0 by default."""


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """Check the JSON schema of a tool's arguments: it must describe an object and stay within the
    size limits. Takes less than a millisecond, however large it is. Raises ValueError."""
    types = schema.get("type")
    names = types if isinstance(types, list) else [types]
    if not any(name is None or str(name).lower() in OBJECT_TYPES for name in names):
        raise ValueError("must be the JSON schema of an object")
    _schema_size(schema)
    return schema


def _schema_size(schema: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of values and of characters in a JSON schema. Raises ValueError if either,
    or the depth of nesting, exceeds its limit."""
    level: list[Any] = [schema]
    num_values = num_chars = 0
    for _ in range(MAX_SCHEMA_DEPTH):
        next_level: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                num_chars += sum(map(len, value))
                next_level += value.values()
            elif isinstance(value, list):
                next_level += value
            elif isinstance(value, str):
                num_chars += len(value)
            if num_values + len(next_level) > MAX_SCHEMA_VALUES or num_chars > MAX_SCHEMA_CHARS:
                limits = f"{MAX_SCHEMA_VALUES} values and {MAX_SCHEMA_CHARS} characters"
                raise ValueError(f"must have at most {limits}")
        if not next_level:
            return num_values, num_chars
        num_values += len(next_level)
        level = next_level
    raise ValueError(f"must have at most {MAX_SCHEMA_DEPTH} levels")


def check_tools(tools: Sequence[Tool]) -> None:
    """Check the limits on a request's tools: their number, the schema size of each, and the size of
    all schemas and descriptions together. Raises ServiceError if one is exceeded."""
    if len(tools) > MAX_TOOLS:
        raise refuse("tools", f"tools: at most {MAX_TOOLS} tools, not {len(tools)}")
    num_values = num_chars = 0
    for tool in tools:
        try:
            values, chars = _schema_size(tool.parameters or {})
        except ValueError as error:
            param = tool.param or "tools"
            raise refuse(param, f"{param}: {error}") from None
        num_values += values
        num_chars += chars + len(tool.description)
    if num_values > MAX_TOOLS_VALUES or num_chars > MAX_TOOLS_CHARS:
        limits = f"{MAX_TOOLS_VALUES} values and {MAX_TOOLS_CHARS} characters"
        raise refuse("tools", f"tools: their schemas and descriptions must have at most {limits}")


ArgumentSchema = Annotated[dict[str, Any], AfterValidator(_bounded)]
"""The JSON schema of a tool's arguments."""

ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
ToolDescription = Annotated[str, StringConstraints(max_length=1 << 16)]


class StrictModel(BaseModel):
    """Base class of request models with strict types: "5" is not accepted for 5, nor true for 1,
    nor NaN. An integer may be written as 16.0."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        integers = {
            name: _whole(value[name])
            for name in _integer_fields(cls)
            if _has_float(value.get(name))
        }
        return {**value, **integers} if integers else value


@cache
def _integer_fields(kind: type[BaseModel]) -> tuple[str, ...]:
    """Return the names of the model's fields whose value is an integer or a list of integers."""
    return tuple(
        field.alias or name
        for name, field in kind.model_fields.items()
        if _takes_integers(field.annotation)
    )


def _takes_integers(annotation: Any) -> bool:
    is_integer = annotation is int or type(annotation) is int  # the latter in a Literal
    return is_integer or any(map(_takes_integers, get_args(annotation)))


def _has_float(value: Any) -> bool:
    return float in map(type, value) if isinstance(value, list) else type(value) is float


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if type(value) is float and value.is_integer() else value


ModelName = Annotated[
    str,
    BeforeValidator(lambda name: "" if name is None else name),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}]}),
]
"""The name of a model; null and an empty name select the only model that is served."""


def _describe_no_limit(schema: dict[str, Any]) -> None:
    schema["anyOf"].insert(1, {"const": -1})


TokenLimit = Annotated[
    int | None,
    AfterValidator(lambda limit: None if limit == -1 else limit),
    Field(json_schema_extra=_describe_no_limit),
]
"""The maximum number of generated tokens; null and -1: as many as fit in the context."""


M = TypeVar("M", bound=StrictModel)


def parse_body(
    kind: type[M],
    body: Mapping[str, Any],
    *,
    refused: Mapping[str, tuple[Any, ...]],
    ignored: Collection[str],
    instead: Mapping[str, str],
    left_out: Collection[str] = (),
    of_other_routes: Collection[str] = (),
) -> M:
    """Validate a request body as a model of type `kind`, and return the model.

    A `refused` field that is not a field of `kind` may have only the values listed for it, which
    request nothing; for any other value an error is raised, which suggests the field in `instead`
    and, for fields `of_other_routes`, says that the field belongs to another request. An `ignored`
    or unknown field has no effect; a `left_out` field has none and is logged. Raises ServiceError
    INVALID_ARGUMENT that names the first wrong field.
    """
    if len(body) > MAX_FIELDS:
        raise refuse("", f"the body has {len(body)} fields; the limit is {MAX_FIELDS}")
    for name, value in body.items():
        if name in kind.model_fields or name in ignored or name not in refused:
            continue
        if not is_neutral(value, refused[name]):
            hint = f"; use {instead[name]}" if name in instead else ""
            is_other = name in of_other_routes
            reason = "a field of this request" if is_other else "supported by this server"
            raise refuse(name, f"{name} is not {reason}{hint}")
    log_unsupported(Handling.LEFT_OUT, "fields", (name for name in left_out if body.get(name)))
    model = parsed(kind, body)
    unknown = set(body) - kind.model_fields.keys() - {*ignored, *refused, *left_out}
    if unknown:
        names = ", ".join(repr(name[:40]) for name in sorted(unknown)[:MAX_LOGGED_NAMES])
        log.debug("ignored %d unknown fields of a request: %s", len(unknown), names)
    return model


def parsed(kind: type[M], value: Any, path: str = "") -> M:
    """Validate one value of a request as a model of type `kind`; `path` is the value's place in the
    request. Raises ServiceError INVALID_ARGUMENT that names the first wrong field."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise first_error(error, path) from None


def check_served(table: EntryTypes, kind: str, path: str) -> None:
    """Check that `table` does not refuse request entries of type `kind`. Raises ServiceError that
    names the types that are served; `path` is the entry's place in the request."""
    if table.get(kind, REFUSED_TYPE).handling is Handling.REFUSED:
        served = ", ".join(
            quoted(name) for name, entry_type in table.items() if entry_type is SERVED_TYPE
        )
        text = f"{quoted(kind)} is not supported by this server, only {served}"
        raise refuse(f"{path}.type", f"{path}.type: {text}")


def first_error(error: ValidationError, path: str = "") -> ServiceError:
    """Convert pydantic's first validation error to a ServiceError that names the wrong field, e.g.
    `messages[0].content`; `path` is put before the name."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = path
    for part in first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    param = cut(param, MAX_QUOTED)  # it may include a client's key
    if first["type"] == "missing":
        return refuse(param, f"{param} is required")
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    return refuse(param, f"{param}: {message.removeprefix('input ')}")
