"""/openapi.json, and /docs: a page that shows it, with all that it needs in this package.

The page is Swagger UI (swagger-ui-dist 5.35.0 of npm, Apache-2.0; its licences lie beside it). A
browser may load nothing from elsewhere.
"""

import asyncio
from collections.abc import Callable, Sequence
from importlib.resources import files

from fastapi import FastAPI, Response
from pydantic_core import to_json

from pdserve.gateway.http.dialect import Dialect
from pdserve.gateway.http.docs.document import document

DOCUMENT = "/openapi.json"
FOLDER = "/docs/"  # here the page's links, which begin with docs/, would not resolve
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>pdserve</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="api"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
START = """window.ui = SwaggerUIBundle({
  url: "openapi.json", dom_id: "#api", deepLinking: true, validatorUrl: null
});
"""
KINDS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
SAFE = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
DAY = {"cache-control": "private, max-age=86400"}


def add_docs(app: FastAPI, dialects: Sequence[Dialect], root_path: str, keys: bool) -> None:
    """Add the documentation routes; call it after all other routes are added. The document is made
    on its first request."""
    cached: list[bytes] = []

    def make() -> bytes:
        if not cached:
            cached.append(to_json(document(app, dialects, root_path, keys)))
        return cached[0]

    @app.get(DOCUMENT, include_in_schema=False)
    async def openapi() -> Response:
        page = cached[0] if cached else await asyncio.to_thread(make)
        return Response(page, media_type="application/json")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(PAGE, media_type="text/html", headers=SAFE)

    @app.get(FOLDER, include_in_schema=False)
    async def folder() -> Response:
        return Response(status_code=307, headers={"location": "../docs"})

    @app.get("/docs/start.js", include_in_schema=False)
    async def start() -> Response:
        return Response(START, media_type="text/javascript", headers=SAFE | DAY)

    for name, kind in KINDS.items():
        app.get(f"/docs/{name}", include_in_schema=False)(_asset(name, kind))


def _asset(name: str, kind: str) -> Callable[[], Response]:
    """Return the route of a file stored and sent compressed, since every browser takes that."""
    file = files("pdserve.gateway.http.docs") / "assets" / f"{name}.gz"
    headers = {**SAFE, **DAY, "content-encoding": "gzip"}

    def asset() -> Response:  # FastAPI runs it on a thread: it reads a file
        return Response(file.read_bytes(), media_type=kind, headers=headers)

    return asset
