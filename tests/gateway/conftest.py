"""Fixtures of the gateway's tests: an application over a scripted router, and clients for it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest
from fakes.router import FakeRouter, Play, saying
from fakes.scripted_parts import ScriptedParts
from fakes.scripted_service import scripted_service
from starlette.types import ASGIApp
from systems.cluster_secret import ACCESS
from systems.eventually import LIMIT_S, eventually

from pdserve.gateway.admission import AdmissionLimits
from pdserve.gateway.anthropic import AnthropicApi
from pdserve.gateway.grpc_api import SERVICE, TEXT_METHODS, KeyInterceptor, TextServicer
from pdserve.gateway.http.api import HttpLimits
from pdserve.gateway.http.app import create_app, create_routes
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.http.serving import HttpServer
from pdserve.gateway.listener import listen
from pdserve.gateway.model_overrides import NO_OVERRIDES, ModelOverrides
from pdserve.gateway.ollama import OllamaApi
from pdserve.gateway.openai import OpenAiApi
from pdserve.gateway.readiness import Readiness
from pdserve.gateway.rerank import RerankApi
from pdserve.gateway.service import Service
from pdserve.gateway.settings import GatewaySettings
from pdserve.gateway.storage import ResponseStore
from pdserve.gateway.web import add_fleet, add_pages
from pdserve.protos.text_pb2_grpc import add_TextServicer_to_server
from pdserve.services.common.rate_limits import RateLimits
from pdserve.services.common.rpc import Backpressure
from pdserve.services.common.server import GrpcServer
from pdserve.services.common.tenants import ApiKeys
from pdserve.text import ParserChoice

BOUNDS = HttpLimits(
    max_body_bytes=1 << 16,
    max_bodies_bytes=1 << 18,
    body_timeout_s=0.5,
    max_buffer_bytes=1 << 16,
    stall_s=0.3,
)
BACKPRESSURE = Backpressure()
NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]


@pytest.fixture(scope="session", autouse=True)
def _servers_end_soon() -> Iterator[None]:
    """Shorten the 0.1 s pauses of uvicorn between checks for shutdown and at its end; these tests
    stop hundreds of servers."""

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / 20)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "uvicorn.server.asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep})
        )
        yield


@pytest.fixture
def make_service() -> Callable[..., Service]:
    return scripted_service


@pytest.fixture
def make_app(make_service: Callable[..., Service]) -> Callable[..., ASGIApp]:
    def make(
        router: FakeRouter,
        keys: tuple[str, ...] = (),
        limits: AdmissionLimits | None = None,
        bounds: HttpLimits = BOUNDS,
        open_metrics: bool = True,
        text_pool: Any = None,
        rates: RateLimits | None = None,
        template_kwargs: Sequence[str] = GatewaySettings().template_kwargs,
        responses: ResponseStore | None = None,
        parsers: ParserChoice | None = None,
        arrange: Callable[[Service], None] = lambda service: None,
        pages: bool = False,
        root_path: str = "",
        fleet_metrics: bool = True,
        strict_max_tokens: bool = False,
        aliases: Sequence[str] = (),
        any_model: bool = False,
        overrides: ModelOverrides = NO_OVERRIDES,
        thinking: bool | None = None,
        **guard: Any,
    ) -> ASGIApp:
        service = make_service(
            router, limits, text_pool, rates, template_kwargs, parsers,
            strict_max_tokens=strict_max_tokens, aliases=aliases, any_model=any_model,
            overrides=overrides, thinking=thinking,
        )  # fmt: skip
        arrange(service)
        bodies = BodyReader(bounds)
        apis = [
            AnthropicApi(service, bounds, bodies),
            RerankApi(service, bodies),
            OllamaApi(service, bounds, bodies),
            OpenAiApi(service, bounds, bodies, responses),
        ]
        readiness = Readiness(router, service.catalog)
        routes = create_routes(apis, service, readiness, fleet_metrics)
        if pages:
            add_fleet(routes, service)
        return create_app(
            apis,
            service,
            readiness,
            ApiKeys(keys),
            open_metrics,
            root_path=root_path,
            routes=routes,
            open_paths=add_pages(routes, root_path) if pages else (),
            **guard,
        )

    return make


Played = Play | FakeRouter | ScriptedParts


def _router(play: Played, options: dict[str, Any]) -> FakeRouter:
    """The router that plays the script; sets the options of make_app that it needs."""
    if isinstance(play, ScriptedParts):
        options["arrange"], play = play.install, saying("unused")
    return play if isinstance(play, FakeRouter) else FakeRouter(play)


@pytest.fixture
async def make_http(
    make_app: Callable[..., ASGIApp], anyio_backend: str
) -> AsyncIterator[Callable[..., httpx.AsyncClient]]:
    """Make plain HTTP clients of an application over a scripted router."""
    clients: list[httpx.AsyncClient] = []

    def make(play: Played, **options: Any) -> httpx.AsyncClient:
        router = _router(play, options)
        transport = httpx.ASGITransport(make_app(router, **options))
        clients.append(httpx.AsyncClient(transport=transport, base_url="http://gateway"))
        return clients[-1]

    yield make
    for client in clients:
        await client.aclose()


@pytest.fixture
async def serve(
    make_app: Callable[..., ASGIApp], make_service: Callable[..., Service], anyio_backend: str
) -> AsyncIterator[Callable[..., object]]:
    """Serve an application over a scripted router on a socket; returns its URL."""
    servers: list[tuple[HttpServer, asyncio.Task[None]]] = []

    async def make(play: Played, send_buffer: int = 0, **options: Any) -> str:
        router = _router(play, options)
        openai = OpenAiApi(make_service(router), BOUNDS, BodyReader(BOUNDS))
        server = HttpServer(make_app(router, **options), openai, BOUNDS.stall_s)
        listener = listen("127.0.0.1", 0)
        if send_buffer:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        servers.append((server, asyncio.create_task(server.serve([listener]))))
        await eventually(lambda: server.started)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield make
    for server, task in servers:
        server.should_exit = True
        await asyncio.wait_for(task, LIMIT_S)


@pytest.fixture
async def connect_to(serve: Callable[..., Any]) -> AsyncIterator[Callable[..., Any]]:
    """Connect clients of a package, made from a URL by a function; `play` may also be the URL."""
    clients: list[Any] = []

    async def make(client_of: Callable[[str], Any], play: Played | str, **options: Any) -> Any:
        url = play if isinstance(play, str) else await serve(play, **options)
        clients.append(client_of(url))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


@pytest.fixture
async def make_channel(
    make_service: Callable[..., Service], anyio_backend: str
) -> AsyncIterator[Callable[..., object]]:
    """Open channels to the gRPC Text service on a socket, over a scripted router."""
    opened: list[tuple[grpc.aio.Channel, GrpcServer]] = []

    async def make(
        router: FakeRouter,
        keys: tuple[str, ...] = (),
        backpressure: Backpressure = BACKPRESSURE,
        rates: RateLimits | None = None,
        max_bytes: int = 1 << 20,
        **of_service: Any,
    ) -> grpc.aio.Channel:
        accepted = ApiKeys(keys)
        guard = KeyInterceptor(accepted)
        host = GrpcServer(ACCESS, TEXT_METHODS, (SERVICE,), interceptors=(guard,))
        service = make_service(router, rates=rates, **of_service)
        text = TextServicer(service, accepted, backpressure, max_bytes)
        add_TextServicer_to_server(text, host.server)
        port = host.listen("127.0.0.1:0")
        await host.start()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=NARROW)
        opened.append((channel, host))
        return channel

    yield make
    for channel, host in opened:
        await channel.close()
        await host.stop(0)
