"""The web pages: a chat at /, a live view at /fleet, and the files that they load.

They are plain HTML, CSS and ES modules, with no build step. Markdown is parsed by marked 18.2.1 and
sanitized by DOMPurify 3.4.18, both of npm, less the last line, which names a source map (MIT;
Apache-2.0 or MPL-2.0; their licences lie beside them). A browser loads nothing from elsewhere and
runs no script that is not a file here; the pages hold no secret, so they need no key.
"""

import gzip
import hashlib
from collections.abc import Callable
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

PAGES = {"/": "chat.html", "/fleet": "fleet.html"}
FILES = "/web/"  # before the name of a file
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
BASE = b'<base href="/">'  # in each page; replaced where a proxy shows it elsewhere
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'self'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # a browser revalidates each use
    "vary": "accept-encoding",
}


class _Asset(NamedTuple):
    kind: str
    etag: str
    packed: bytes  # with gzip


def add_pages(app: FastAPI, root_path: str) -> list[str]:
    """Return the paths that need no key. `root_path` is where a proxy shows the application."""
    base = f'<base href="{root_path.rstrip("/")}/">'.encode()
    assets = files("pdserve.gateway.web") / "assets"
    assets_by_name = {_name(file): file for file in assets.iterdir() if file.is_file()}
    assets_by_name |= {
        _name(f): f for f in (assets / "vendored").iterdir() if f.name.endswith(".gz")
    }
    cache: dict[str, _Asset] = {}

    def file(name: str) -> _Asset:
        """Return a file, which is read once, on its first request."""
        if name not in cache:
            cache[name] = _read(name, assets_by_name[name], base)
        return cache[name]

    for path, name in PAGES.items():
        app.get(path, include_in_schema=False)(_page(file, name))

    @app.get(f"{FILES}{{name}}", include_in_schema=False)
    def asset(request: Request, name: str) -> Response:  # FastAPI runs it on a thread
        if name not in assets_by_name or name in PAGES.values():
            raise HTTPException(404)
        return _answer(request, file(name))

    return [
        *PAGES,
        *(f"{FILES}{name}" for name in sorted(assets_by_name.keys() - set(PAGES.values()))),
    ]


def _page(file: Callable[[str], _Asset], name: str) -> Callable[[Request], Response]:
    def page(request: Request) -> Response:
        return _answer(request, file(name))

    return page


def _name(file: Traversable) -> str:
    return file.name.removesuffix(".gz")


def _read(name: str, file: Traversable, base: bytes) -> _Asset:
    content = file.read_bytes()
    packed = content
    if not file.name.endswith(".gz"):
        packed = gzip.compress(content.replace(BASE, base), mtime=0)
    etag = f'W/"{hashlib.sha256(packed).hexdigest()[:16]}"'
    return _Asset(KINDS[f".{name.rpartition('.')[2]}"], etag, packed)


def _answer(request: Request, file: _Asset) -> Response:
    headers = {**HEADERS, "etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(gzip.decompress(file.packed), media_type=file.kind, headers=headers)
    headers["content-encoding"] = "gzip"
    return Response(file.packed, media_type=file.kind, headers=headers)
