"""The OpenAPI document of all routes (/openapi.json), and the web page /docs that shows it.

A route is described where it is added: `@app.post(path, **describe(Body, response=Answer))`. The
error responses are added in this module, in the format of the API to which the path belongs.

The page is Swagger UI (swagger-ui-dist 5.35.0 of npm, Apache-2.0; its licence files are in the
folder of assets) below a field for the API key, without which it does not load the document. The
page has no secret, so it needs no key. It loads nothing from other hosts.
"""

import asyncio
import re
from collections.abc import Callable, Collection, Sequence
from http import HTTPStatus
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict
from pydantic_core import to_json

from pdserve.gateway.http.api import HttpApi, api_of
from pdserve.services.common.errors import HTTP_STATUS

_REF = "#/components/schemas/{model}"
_DESCRIPTION = "x-pdserve-description"  # a function that makes the operation
_MODELS = "x-pdserve-models"  # the schemas that a description refers to, until it is complete
CLIENT_LEFT = 499  # no client is left to read it
SHELL_ERRORS = (401, 403, 404, 405)
BODY_ERRORS = (408, 413, 415)
LINES = "application/x-ndjson"  # a stream of JSON objects, one per line
ADMIN_KEY = "admin_key"
SECURITY_SCHEMES = {
    "key": {"type": "http", "scheme": "bearer", "description": "The API key of a client."},
    ADMIN_KEY: {"type": "http", "scheme": "bearer", "description": "The key of --admin-api-key."},
}
_EVENT = {  # before OpenAPI 3.2, a stream's schema is that of each event
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
Model = type[BaseModel]
DOCUMENT = "/openapi.json"
PAGE = "/docs"
FOLDER = "/docs/"  # here the page's links, which begin with docs/, would not resolve
ASSETS = files("pdserve.gateway.http") / "assets"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
FILES = ("page.css", "start.js")  # below FOLDER
VENDORED = ("swagger-ui-bundle.js", "swagger-ui.css")  # stored in gzip form
SAFE = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
FRESH = {"cache-control": "no-cache"}
DAY = {"cache-control": "private, max-age=86400"}


class Group(NamedTuple):
    """Routes that the page shows together: those at the paths and below them."""

    name: str
    description: str
    paths: tuple[str, ...]


GROUPS = (
    Group(
        "Chat and completions",
        "OpenAI's API: the next message of a conversation, or the continuation of a text.",
        ("/v1/chat/completions", "/v1/completions"),
    ),
    Group("Responses", "OpenAI's API of conversations that the server stores.", ("/v1/responses",)),
    Group("Messages", "Anthropic's API.", ("/v1/messages",)),
    Group("Ollama", "Ollama's API.", ("/api",)),
    Group(
        "Embeddings and scores",
        "Vectors of texts, and how well texts answer a query.",
        ("/v1/embeddings", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"),
    ),
    Group("Files and batches", "Many requests at once.", ("/v1/files", "/v1/batches")),
    Group(
        "Models and tokens",
        "The served models, and their tokenizers and chat templates.",
        ("/v1/models", "/tokenize", "/detokenize", "/tokenizer_info", "/apply-template"),
    ),
)
SERVER = Group("Server", "Health, metrics, usage, and what the server does now.", ())  # the rest


class ResponseModel(BaseModel):
    """Base class of models that only describe responses in the OpenAPI document, and do not create
    them. pydantic builds each model only when the document is made."""

    model_config = ConfigDict(defer_build=True)


def describe(
    *bodies: Model,
    response: Model,
    event: Model | None = None,
    end: str = "",
    stream: str = "",
    form: Model | None = None,
    query: Model | None = None,
    security: str = "",
) -> dict[str, Any]:
    """Return the keyword arguments that describe a route to FastAPI: `bodies` are the alternative
    types of its request body (none: no body), `response` is the type of its response.

    `event`: the response may be a stream of these events. `end` is the data of the last event.
    `stream=LINES`: the stream has lines of JSON instead of server-sent events. `form` has the
    fields of a form body, `query` the optional parameters of the URL. `security`: the name in
    SECURITY_SCHEMES of the key that the route requires in place of a client's.
    """

    def operation() -> dict[str, Any]:
        models: dict[str, Any] = {}
        content: dict[str, Any] = {"application/json": {"schema": _ref(response, models)}}
        if stream == LINES and event is not None:
            content[LINES] = {"schema": _ref(event, models)}
        elif event is not None:
            data = f"With `stream: true` the data of each event is a {event.__name__}"
            text = f"{data}, or an error" + (f"; at the end {end}." if end else ".")
            content["text/event-stream"] = {
                "schema": {**_EVENT, "description": text},
                "x-event-schema": _ref(event, models),
            }
        operation: dict[str, Any] = {"responses": {"200": {"content": content}}, _MODELS: models}
        if bodies:
            refs = [_ref(body, models) for body in bodies]
            schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
            body = {"application/json": {"schema": schema}}
            operation["requestBody"] = {"required": True, "content": body}
        if form is not None:
            body = {"multipart/form-data": {"schema": _ref(form, models)}}
            operation["requestBody"] = {"required": True, "content": body}
        if query is not None:
            fields = query.model_json_schema()["properties"]
            operation["parameters"] = [
                {"name": name, "in": "query", "required": False, "schema": field}
                for name, field in fields.items()
            ]
        if security:
            operation["security"] = [{security: []}]
        return operation

    # Schemas take long to make: `document` makes them.
    return {"openapi_extra": {_DESCRIPTION: operation}}


def document(
    app: FastAPI,
    apis: Sequence[HttpApi],
    root_path: str,
    keys: bool,
    open_paths: Collection[str] = (),
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of all routes as an object; this takes about 0.1 s. `keys`:
    the document says that clients need an API key, except for `open_paths`."""
    for route in app.routes:
        extra = getattr(route, "openapi_extra", None) or {}
        if isinstance(route, APIRoute) and _DESCRIPTION in extra:
            route.openapi_extra = extra[_DESCRIPTION]()
    page: dict[str, Any] = get_openapi(
        title="pdserve",
        version=version("pdserve"),
        openapi_version="3.1.0",
        routes=app.routes,
        servers=[{"url": root_path or "/"}],
    )
    models = page.setdefault("components", {}).setdefault("schemas", {})
    schemes = {"key"} if keys else set()
    for path, operations in page["paths"].items():
        api = api_of(apis, path)
        for operation in operations.values():
            schemes |= {name for one in operation.get("security", ()) for name in one}
            if keys and path in open_paths:
                operation.setdefault("security", [])
            _add(models, operation.pop(_MODELS, {}))
            operation["tags"] = [_group(path).name]
            operation["summary"] = _first_sentence(operation.get("description", path))
            error = {"content": {"application/json": {"schema": _ref(api.error_model, models)}}}
            answers = operation["responses"]
            answers.pop("422", None)  # FastAPI's 422, which no route here returns
            body_errors = BODY_ERRORS if "requestBody" in operation else ()
            statuses = {*HTTP_STATUS.values(), *SHELL_ERRORS, *body_errors} - {CLIENT_LEFT}
            for status in (api.statuses.get(status, status) for status in sorted(statuses)):
                answers.setdefault(str(status), {"description": _phrase(status), **error})
    page["tags"] = [{"name": g.name, "description": g.description} for g in (*GROUPS, SERVER)]
    for unused in ("HTTPValidationError", "ValidationError"):
        models.pop(unused, None)
    if schemes:
        used = {name: SECURITY_SCHEMES[name] for name in sorted(schemes)}
        page["components"]["securitySchemes"] = used
    if keys:
        page["security"] = [{"key": []}]
    return page


def _group(path: str) -> Group:
    def has(group: Group) -> bool:
        return any(f"{path}/".startswith(f"{beginning}/") for beginning in group.paths)

    return next(filter(has, GROUPS), SERVER)


def _first_sentence(text: str) -> str:
    """Return the first sentence of a description on one line, without its full stop."""
    return re.split(r"[.;:](?:\s|$)", text)[0].replace("\n", " ")


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:  # an API's own status
        return "Error"


def _add(models: dict[str, Any], schemas: dict[str, Any]) -> None:
    for name, schema in schemas.items():
        if models.setdefault(name, schema) != schema:
            raise ValueError(f"two different models of the OpenAPI document are named {name}")


def _ref(model: Model, models: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON reference to the model's schema. Adds that schema, and those that it refers to,
    to `models`."""
    schema = model.model_json_schema(ref_template=_REF)
    models |= schema.pop("$defs", {})
    models[model.__name__] = schema
    return {"$ref": _REF.format(model=model.__name__)}


def add_docs(
    app: FastAPI,
    apis: Sequence[HttpApi],
    root_path: str,
    keys: bool,
    open_paths: Collection[str] = (),
) -> list[str]:
    """Add the routes /openapi.json and /docs, and those of the page's files. Call it after all
    other routes are added. The document is made at its first request; `keys` and `open_paths` are
    those of `document`. Returns the paths that need no key."""
    cached: list[bytes] = []

    def make() -> bytes:
        if not cached:
            cached.append(to_json(document(app, apis, root_path, keys, open_paths)))
        return cached[0]

    @app.get(DOCUMENT, include_in_schema=False)
    async def openapi() -> Response:
        page = cached[0] if cached else await asyncio.to_thread(make)
        return Response(page, media_type="application/json")

    @app.get(FOLDER, include_in_schema=False)
    async def folder() -> Response:
        return Response(status_code=307, headers={"location": "../docs"})

    packed = {**DAY, "content-encoding": "gzip"}  # every browser accepts gzip
    handlers = {PAGE: _asset(ASSETS / "docs.html", ".html", FRESH)}
    for name in FILES:
        handlers[FOLDER + name] = _asset(ASSETS / name, _ending(name), FRESH)
    for name in VENDORED:
        handlers[FOLDER + name] = _asset(ASSETS / f"{name}.gz", _ending(name), packed)
    for path, handler in handlers.items():
        app.get(path, include_in_schema=False)(handler)
    return [FOLDER, *handlers]


def _ending(name: str) -> str:
    return name[name.rindex(".") :]


def _asset(file: Traversable, ending: str, headers: dict[str, str]) -> Callable[[], Response]:
    """Return the handler of a file of the page."""

    def asset() -> Response:  # FastAPI runs it on a thread: it reads a file
        return Response(file.read_bytes(), media_type=KINDS[ending], headers={**SAFE, **headers})

    return asset
