"""The OpenAPI document of all routes, made from the routes and the models of their bodies.

A route is described where it is added: `@app.post(path, **described(Body, answer=Answer))`. Errors
are described here, in the shape of the path's dialect.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict

from pdserve.gateway.http.dialect import Dialect, dialect_of
from pdserve.services.host.errors import HTTP_STATUS

_REF = "#/components/schemas/{model}"
_DESCRIPTION = "x-pdserve-description"  # a Description, until the document is made
_MODELS = "x-pdserve-models"  # the schemas that a description refers to, until it is complete
CLIENT_LEFT = 499  # no client is left to read it
SHELL_ERRORS = (401, 403, 404, 405)
BODY_ERRORS = (408, 413, 415)
LINES = "application/x-ndjson"  # a stream of JSON objects, one per line
_EVENT = {  # before OpenAPI 3.2, a stream's schema is that of each event
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
Model = type[BaseModel]


class AnswerModel(BaseModel):
    """A part of an answer, for the description alone: it is not built before that is made."""

    model_config = ConfigDict(defer_build=True)


@dataclass(frozen=True, slots=True)
class Description:
    """The request and response types of a route; making schemas takes long, so `document` does."""

    bodies: tuple[Model, ...]
    answer: Model
    event: Model | None
    end: str
    stream: str
    form: Model | None
    query: Model | None

    def operation(self) -> dict[str, Any]:
        """Return this description as part of an OpenAPI operation."""
        models: dict[str, Any] = {}
        content: dict[str, Any] = {"application/json": {"schema": _ref(self.answer, models)}}
        if self.stream == LINES and self.event is not None:
            content[LINES] = {"schema": _ref(self.event, models)}
        elif self.event is not None:
            data = f"With `stream: true` the data of each event is a {self.event.__name__}"
            text = f"{data}, or an error" + (f"; at the end {self.end}." if self.end else ".")
            content["text/event-stream"] = {
                "schema": {**_EVENT, "description": text},
                "x-event-schema": _ref(self.event, models),
            }
        operation: dict[str, Any] = {"responses": {"200": {"content": content}}, _MODELS: models}
        if self.bodies:
            refs = [_ref(body, models) for body in self.bodies]
            schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
            body = {"application/json": {"schema": schema}}
            operation["requestBody"] = {"required": True, "content": body}
        if self.form is not None:
            body = {"multipart/form-data": {"schema": _ref(self.form, models)}}
            operation["requestBody"] = {"required": True, "content": body}
        if self.query is not None:
            fields = self.query.model_json_schema()["properties"]
            operation["parameters"] = [
                {"name": name, "in": "query", "required": False, "schema": field}
                for name, field in fields.items()
            ]
        return operation


def described(
    *bodies: Model,
    answer: Model,
    event: Model | None = None,
    end: str = "",
    stream: str = "",
    form: Model | None = None,
    query: Model | None = None,
) -> dict[str, Any]:
    """Return further arguments of a route: the body it takes (one of several, or none) and its
    answer. With `event` it can also stream events, after which `end` is the data of the last;
    `stream`: LINES if they are not server-sent events. `form` has the fields of a form body,
    `query` optional parameters of the URL."""
    description = Description(bodies, answer, event, end, stream, form, query)
    return {"openapi_extra": {_DESCRIPTION: description}}


def document(
    app: FastAPI, dialects: Sequence[Dialect], root_path: str, keys: bool
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document, in a tenth of a second. `keys`: clients need a key."""
    for route in app.routes:
        extra = getattr(route, "openapi_extra", None) or {}
        if isinstance(route, APIRoute) and _DESCRIPTION in extra:
            route.openapi_extra = extra[_DESCRIPTION].operation()
    page: dict[str, Any] = get_openapi(
        title="pdserve",
        version=version("pdserve"),
        openapi_version="3.1.0",
        routes=app.routes,
        servers=[{"url": root_path or "/"}],
    )
    models = page.setdefault("components", {}).setdefault("schemas", {})
    for path, operations in page["paths"].items():
        dialect = dialect_of(dialects, path)
        for operation in operations.values():
            _add(models, operation.pop(_MODELS, {}))
            error = {"content": {"application/json": {"schema": _ref(dialect.error_model, models)}}}
            answers = operation["responses"]
            answers.pop("422", None)  # FastAPI's 422, which no route here returns
            statuses = _statuses("requestBody" in operation)
            for status in (dialect.statuses.get(status, status) for status in statuses):
                answers.setdefault(str(status), {"description": _phrase(status), **error})
    for unused in ("HTTPValidationError", "ValidationError"):
        models.pop(unused, None)
    if keys:
        page["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        page["security"] = [{"key": []}]
    return page


def _statuses(has_body: bool) -> list[int]:
    statuses = {*HTTP_STATUS.values(), *SHELL_ERRORS, *(BODY_ERRORS if has_body else ())}
    return sorted(statuses - {CLIENT_LEFT})


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:  # a dialect's own status
        return "Error"


def _add(models: dict[str, Any], schemas: dict[str, Any]) -> None:
    for name, schema in schemas.items():
        if models.setdefault(name, schema) != schema:
            raise ValueError(f"two models of the API description are named {name}")


def _ref(model: Model, models: dict[str, Any]) -> dict[str, Any]:
    """Return a reference to the model's schema; add it to `models` with all that it references."""
    schema = model.model_json_schema(ref_template=_REF)
    models |= schema.pop("$defs", {})
    models[model.__name__] = schema
    return {"$ref": _REF.format(model=model.__name__)}
