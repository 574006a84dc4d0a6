"""The web pages of the gateway: a chat at /, a live view of the fleet at /fleet, and the files that
they load. Also GET /fleet/state, which returns the workers as the router sees them and the requests
of one client.

The pages are plain HTML, CSS and ES modules, with no build step. Markdown is parsed by marked
18.2.1 and sanitized by DOMPurify 3.4.18, code is colored by highlight.js 11.12.0
(@highlightjs/cdn-assets, its common languages) and formulas are converted to MathML by KaTeX
0.19.1. All are of npm; the first two are without their last line, which names a source map. Their
licences (MIT; Apache-2.0 or MPL-2.0; BSD-3-Clause; MIT) are in the same folder. The pages load
nothing from other hosts and run only scripts that are files of this server; they contain no secret,
so they need no key. The fleet page shows each client all workers, as /metrics does, but only the
requests made with the client's API key.
"""

import asyncio
import gzip
import hashlib
from collections.abc import Callable
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple, TypeVar

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from pdserve.gateway.http.docs import ResponseModel, describe
from pdserve.gateway.http.guard import caller_of
from pdserve.gateway.metrics import MAX_SHOWN, RequestSnapshot
from pdserve.gateway.router_client import Upstream
from pdserve.gateway.service import Service
from pdserve.protos.fleet_pb2 import Role
from pdserve.protos.router_pb2 import FleetView, WorkerView
from pdserve.services.common.errors import ServiceError

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
    """Add the routes of the pages and their files. Returns their paths, which need no key.
    `root_path` is the path prefix under which a reverse proxy publishes the application."""
    base = f'<base href="{root_path.rstrip("/")}/">'.encode()
    assets = files("pdserve.gateway.web") / "assets"
    assets_by_name = {_name(file): file for file in assets.iterdir() if file.is_file()}
    assets_by_name |= {
        _name(f): f for f in (assets / "vendored").iterdir() if f.name.endswith(".gz")
    }
    cache: dict[str, _Asset] = {}

    def file(name: str) -> _Asset:
        """Return the content of a file by its name. It is read at the first request and then
        cached."""
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


M = TypeVar("M", bound=ResponseModel)
FRESH_S = 0.5  # maximum age of the fleet's view, so that many viewers cost no more than one


class FleetBlocks(ResponseModel):
    """Numbers of KV cache blocks of a worker; free, used, cached and reserved blocks make up the
    total."""

    total: int
    free: int
    used: int
    cached: int
    reserved: int


class FleetWorker(ResponseModel):
    """A worker of the fleet. `running` and `waiting` count requests; numbers of tokens and
    preemptions are totals since the worker's start."""

    incarnation: str
    role: str
    state: str
    silent_s: float
    address: str
    model: str
    running: int
    waiting: int
    waiting_tokens: int
    parked: int
    blocks: FleetBlocks
    prefill_tokens_s: float
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int


class FleetCounters(ResponseModel):
    """Counters of prefills, retries and moves of requests since the router's start; with
    --join-routers, the sums over all routers."""

    prefill_local: int
    prefill_remote: int
    retries: int
    moves: int
    moves_failed: int


class FleetRequest(ResponseModel):
    """A request. `phase` is preparing, placing, prefill, decode or ended. `prepared_s`,
    `first_token_s` and `elapsed_s` are seconds since the request's arrival; `queue_s`, `prefill_s`,
    `transfer_s` and `first_step_s` are durations of phases in seconds. `arrived_s` and `ended_s`
    are seconds since the arrival and since the end."""

    id: str
    model: str
    phase: str
    prefill_at: str
    decode_at: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    arrived_s: float
    prepared_s: float | None
    queue_s: float
    prefill_s: float
    transfer_s: float
    first_step_s: float
    first_token_s: float | None
    elapsed_s: float
    ended_s: float | None
    finish: str


class RequestsShown(ResponseModel):
    """The open and the latest ended requests of one gateway process. Other gateway processes that
    listen at the same port have their own."""

    open: list[FleetRequest]
    num_open: int
    ended: list[FleetRequest]


class FleetState(RequestsShown):
    """The answer of /fleet/state: the workers of the fleet, and the requests of all gateway
    processes. While no router responds, `workers` is empty, `counters` is null and `error` is the
    reason."""

    workers: list[FleetWorker]
    counters: FleetCounters | None
    error: str


def add_fleet(app: FastAPI, service: Service) -> None:
    """Add the route /fleet/state, which also includes the requests of the other gateway
    processes."""
    clock = service.clock
    latest = _LatestView(service.upstream, clock)

    def requests_of_process(tenant: bytes) -> RequestsShown:
        now = clock()
        open_requests = service.requests.open_of(tenant)
        return RequestsShown(
            open=[_fleet_request(request, now) for request in open_requests[:MAX_SHOWN]],
            num_open=len(open_requests),
            ended=[_fleet_request(request, now) for request in service.requests.ended_of(tenant)],
        )

    def answer(tenant: bytes, _: str) -> bytes:
        return requests_of_process(tenant).model_dump_json().encode()

    service.processes.serve("requests", answer)

    @app.get("/fleet/state", **describe(response=FleetState))
    async def state(request: Request) -> Response:
        """Return the workers as the router sees them, and the open and latest requests of this
        key."""
        tenant = caller_of(request).tenant.id
        workers, counters, error = [], None, ""
        try:
            view = await latest.get()
        except ServiceError as failed:
            error = failed.message
        else:
            workers = [_fleet_worker(worker) for worker in view.workers]
            counters = _from_attributes(FleetCounters, view)
        others = await service.processes.query("requests", tenant)
        all_shown = [requests_of_process(tenant), *map(RequestsShown.model_validate_json, others)]
        open_requests = sorted(
            (r for shown in all_shown for r in shown.open), key=lambda r: -r.arrived_s
        )
        ended = sorted(
            (r for shown in all_shown for r in shown.ended), key=lambda r: r.ended_s or 0.0
        )
        fleet_state = FleetState(
            workers=sorted(workers, key=lambda worker: (worker.role, worker.address)),
            counters=counters,
            error=error,
            open=open_requests[:MAX_SHOWN],
            num_open=sum(shown.num_open for shown in all_shown),
            ended=ended[:MAX_SHOWN],
        )
        headers = {"cache-control": "no-store"}
        return Response(
            fleet_state.model_dump_json(), media_type="application/json", headers=headers
        )


class _LatestView:
    """Cache of the router's view of the fleet: it sends one query to the router at a time, and at
    most one per FRESH_S."""

    def __init__(self, upstream: Upstream, clock: Callable[[], float]) -> None:
        self._upstream = upstream
        self._clock = clock
        self._querying = asyncio.Lock()
        self._view = FleetView()
        self._at = float("-inf")

    async def get(self) -> FleetView:
        async with self._querying:
            if self._clock() - self._at > FRESH_S:
                self._view = await self._upstream.fleet()
                self._at = self._clock()
            return self._view


def _from_attributes(kind: type[M], source: object, **fields: Any) -> M:
    """Return a model of type `kind` with the given fields; its other fields are read from
    attributes of `source` with the same names."""
    names = kind.model_fields.keys() - fields.keys()
    return kind(**fields, **{name: getattr(source, name) for name in names})


def _fleet_worker(view: WorkerView) -> FleetWorker:
    hello, load = view.hello, view.load
    blocks = {name: getattr(load, f"blocks_{name}") for name in FleetBlocks.model_fields}
    return _from_attributes(
        FleetWorker,
        load,
        incarnation=hello.incarnation.hex(),
        role=Role.Name(hello.role).lower(),
        state=view.state,
        silent_s=view.silent_s,
        address=hello.address,
        model=hello.card.name,
        blocks=FleetBlocks(**blocks),
    )


def _fleet_request(state: RequestSnapshot, now: float) -> FleetRequest:
    phases = state.phases
    arrived_s = now - state.arrived
    return _from_attributes(
        FleetRequest,
        state,
        id=state.request_id,
        arrived_s=arrived_s,
        queue_s=phases.queue_s,
        prefill_s=phases.prefill_s,
        transfer_s=phases.transfer_s,
        first_step_s=phases.first_token_s,
        ended_s=arrived_s - state.elapsed_s if state.phase == "ended" else None,
    )
