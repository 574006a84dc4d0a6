"""A gateway's HTTP server over a scripted router, in a thread with a separate event loop."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop
from fakes.pooled_answers import HIDDEN, NO, YES, embedding, judging, vector_of
from fakes.router import Event, FakeRouter, saying, served
from fakes.scripted_service import scripted_service

from pdserve.gateway.admin_key import AdminKey
from pdserve.gateway.admission import AdmissionLimits
from pdserve.gateway.anthropic import AnthropicApi
from pdserve.gateway.http.admin import ADMIN_PATHS, add_admin
from pdserve.gateway.http.api import HttpLimits
from pdserve.gateway.http.app import create_app, create_routes
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.http.serving import HttpServer
from pdserve.gateway.listener import listen
from pdserve.gateway.ollama import OllamaApi
from pdserve.gateway.openai import OpenAiApi
from pdserve.gateway.openai.stored.parts import StoredParts
from pdserve.gateway.readiness import Readiness
from pdserve.gateway.rerank import RerankApi
from pdserve.gateway.settings import GatewaySettings
from pdserve.gateway.web import add_fleet, add_pages
from pdserve.protos import common_pb2 as pb
from pdserve.services.common.tenants import ApiKeys

LIMITS = HttpLimits(1 << 20, 1 << 24, 5.0, 1 << 20, 10.0)
START_S = 20.0


def every_kind() -> FakeRouter:
    """Serve the model "tiny", which always gives the same answer, an "embedder" and a
    "reranker".
    """
    tiny, blobs = served()
    embedder, _ = served("embedder")
    embedder.pooling, embedder.normalizes, embedder.hidden_size = "last", True, HIDDEN
    reranker, _ = served("reranker")
    reranker.score_token_ids.extend((YES, NO))
    plays = {
        "tiny": saying("hello world"),
        "embedder": embedding(vector_of),
        "reranker": judging(lambda ids: (0.1 * len(ids), 10.0)),
    }

    async def play(router: FakeRouter, start: pb.Start) -> AsyncGenerator[Event, None]:
        judges = list(start.params.logprob_token_ids) == [YES, NO] and start.model == "reranker"
        name = "tiny" if start.model == "reranker" and not judges else start.model
        async for event in plays[name](router, start):
            yield event

    return FakeRouter(play, [tiny, embedder, reranker], blobs)


@contextmanager
def served_gateway(
    make_router: Callable[[], FakeRouter] = every_kind,
    api_keys: tuple[str, ...] = (),
    root_path: str = "",
) -> Iterator[str]:
    """Yield its URL. It has every API, a database, the pages, and the operator's routes."""
    started = threading.Event()
    stop: list[tuple[asyncio.AbstractEventLoop, HttpServer]] = []
    with TemporaryDirectory() as folder, listen("127.0.0.1", 0) as listener:

        async def serve() -> None:
            router = make_router()
            settings = GatewaySettings(database_url=f"sqlite:///{Path(folder)}/gateway.db")
            keys, limits = ApiKeys(api_keys), AdmissionLimits(64, 32)
            stored = StoredParts(settings, keys, limits)
            await stored.start()
            service = scripted_service(router, limits, count_usage=stored.usage.count)
            bodies = BodyReader(LIMITS)
            openai = OpenAiApi(service, LIMITS, bodies, stored.responses, stored.routes)
            apis = [
                AnthropicApi(service, LIMITS, bodies),
                RerankApi(service, bodies),
                OllamaApi(service, LIMITS, bodies),
                openai,
            ]
            readiness = Readiness(router, service.catalog)
            routes = create_routes(apis, service, readiness)
            add_fleet(routes, service)
            add_admin(routes, AdminKey("operator", keys), lambda: None)
            app = create_app(
                apis,
                service,
                readiness,
                keys,
                routes=routes,
                root_path=root_path,
                open_paths=[*add_pages(routes, root_path), *ADMIN_PATHS],
            )
            server = HttpServer(app, openai, LIMITS.stall_s)
            running = asyncio.create_task(stored.run(routes))
            stop.append((asyncio.get_running_loop(), server))
            started.set()
            await server.serve([listener])
            running.cancel()
            await asyncio.wait([running])
            await stored.close()

        thread = threading.Thread(target=lambda: uvloop.run(serve()), name="gateway")
        thread.start()
        assert started.wait(START_S)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            loop, server = stop[0]
            loop.call_soon_threadsafe(setattr, server, "should_exit", True)
            thread.join()
