"""A gateway's HTTP server over a scripted router, in a thread with an event loop of its own."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop
from fake_router import FakeRouter, saying
from scripted_service import scripted_service

from pdserve.gateway.http.app import create_app
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.http.dialect import HttpLimits
from pdserve.gateway.http.serving.server import HttpServer, listen
from pdserve.gateway.observability.readiness import Readiness
from pdserve.gateway.openai.dialect import OpenAiDialect
from pdserve.services.host.tenants.keys import ApiKeys

LIMITS = HttpLimits(1 << 20, 1 << 24, 5.0, 1 << 20, 10.0)
START_S = 20.0


@contextmanager
def served_gateway() -> Iterator[str]:
    """Its URL. It serves the model "tiny", which always says the same."""
    started = threading.Event()
    stop: list[tuple[asyncio.AbstractEventLoop, HttpServer]] = []
    with listen("127.0.0.1", 0) as listener:

        async def serve() -> None:
            router = FakeRouter(saying("hello world"))
            service = scripted_service(router)
            dialect = OpenAiDialect(service, LIMITS, BodyReader(LIMITS))
            app = create_app([dialect], service, Readiness(router, service.catalog), ApiKeys())
            server = HttpServer(app, dialect)
            stop.append((asyncio.get_running_loop(), server))
            started.set()
            await server.serve([listener])

        thread = threading.Thread(target=lambda: uvloop.run(serve()), name="gateway")
        thread.start()
        assert started.wait(START_S)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            loop, server = stop[0]
            loop.call_soon_threadsafe(setattr, server, "should_exit", True)
            thread.join()
