"""Preparation of prompts: off the event loop, in bounded time, from blobs loaded once."""

import asyncio
from functools import partial

import pytest
from builders.broken_tokenizers import panics_on_load, panics_on_text
from fakes.in_process_text import InProcessPool
from fakes.router import FakeRouter, saying, served
from systems.eventually import LIMIT_S, eventually
from systems.tokenizer_pools import Pool, workers

from pdserve.gateway.catalog import Catalog
from pdserve.gateway.router_client import merge
from pdserve.gateway.settings import GatewaySettings
from pdserve.protos import common_pb2 as pb
from pdserve.services.common.errors import ServiceError

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "hi"}]


class CountingPool(InProcessPool):
    loads = 0

    async def load(self, card, files):
        self.loads += 1
        return await super().load(card, files)


@pytest.fixture
async def pool(anyio_backend):
    """A pool whose models have a single worker."""
    pool = Pool(workers=1)
    yield pool
    await pool.close()


async def test_a_slow_tokenizer_does_not_block_the_loop(make_http, pool):
    """Suspend the worker process to make the tokenizer slow."""
    client = make_http(saying("hello"), text_pool=pool)
    chat = partial(client.post, "/v1/chat/completions", json={"model": "tiny", "messages": HI})
    assert (await chat()).status_code == 200
    (worker,) = workers()
    worker.suspend()
    request = asyncio.create_task(chat())
    for _ in range(5):
        assert (await client.get("/health")).status_code == 200
    assert not request.done()
    worker.resume()
    assert (await request).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_panic_during_preparation_is_one_error(make_http, pool, stream):
    card, blobs = served()
    blobs[card.tokenizer_digest] = panics_on_text(blobs[card.tokenizer_digest])
    client = make_http(FakeRouter(saying("hello"), [card], blobs), text_pool=pool)
    for path, body in (
        ("/v1/chat/completions", {"model": "tiny", "messages": HI}),
        ("/v1/completions", {"model": "tiny", "prompt": "hi"}),
        ("/tokenize", {"prompt": "hi"}),
    ):
        reply = await client.post(path, json=body | {"stream": stream})
        assert reply.status_code == 400
        assert set(reply.json()) == {"error"}
        assert "cannot be prepared: PanicException" in reply.json()["error"]["message"]
    assert (await client.post("/tokenize", json={"prompt": "A"})).status_code == 200


async def test_two_models_with_one_tokenizer_load_it_once(anyio_backend):
    card, blobs = served("one")
    other = served("two")[0]
    router = FakeRouter(saying("x"), [card, other], blobs)
    catalog = Catalog(router, InProcessPool())
    one, two, again = await asyncio.gather(*map(catalog.get, ("one", "two", "one")))
    assert one.text is two.text is again.text
    assert (one.card.name, two.card.name) == ("one", "two")


@pytest.mark.parametrize(
    ("broken", "change"),
    [
        ("tokenizer_digest", lambda _: b"\xff{{"),
        ("tokenizer_digest", panics_on_load),
        ("template_digest", lambda _: b"\xff{{"),
        ("template_digest", lambda _: b"{{ " + b"9" * 5000 + b" }}"),
    ],
)
async def test_a_broken_blob_is_a_server_error(make_http, caplog, monkeypatch, broken, change):
    """Requests fail with that error, the gateway stays ready, and loading is retried after a
    while."""
    card, blobs = served()
    digest = getattr(card, broken)
    good = blobs[digest]
    blobs[digest] = change(good)
    pool = CountingPool()
    client = make_http(FakeRouter(saying("x"), [card], blobs), text_pool=pool)
    await client.get("/ready")  # starts to load it, and waits for a limited time
    said = "model 'tiny': the tokenizer could not be loaded"
    await eventually(lambda: said in caplog.text)
    for _ in range(2):
        assert (await client.get("/ready")).status_code == 200
    assert caplog.text.count(said) == 1
    body = {"json": {"model": "tiny", "messages": HI}}
    for stream in (False, True):
        answer = await client.post("/v1/chat/completions", json={**body["json"], "stream": stream})
        assert answer.status_code == 503
        assert set(answer.json()) == {"error"}
        assert int(answer.headers["retry-after"]) in range(50, 61)
    assert pool.loads == 1
    blobs[digest] = good
    assert (await client.post("/v1/chat/completions", **body)).status_code == 503
    monkeypatch.setattr("pdserve.gateway.catalog.REFUSED_S", 0.0)
    assert (await client.post("/v1/chat/completions", **body)).status_code == 200


async def test_models_are_ready_once_loaded(anyio_backend):
    """A model whose files do not arrive does not delay another."""
    card, blobs = served("one")
    stalled = served("two", generation={"temperature": 0.5})[0]
    router, arrives = FakeRouter(saying("x"), [card, stalled], blobs), asyncio.Event()

    async def blob(digest):
        if digest not in blobs:
            await arrives.wait()
        return blobs.get(digest, b"{}")

    router.blob = blob
    catalog = Catalog(router, InProcessPool())
    assert await catalog.ready([stalled, card], 0.0) == []
    assert (await catalog.get("one")).card.name == "one"
    assert await catalog.ready([stalled, card], 0.0) == ["one"]
    assert await catalog.ready([stalled, card], LIMIT_S) == ["one"]  # at once
    arrives.set()
    assert (await catalog.get("two")).card.name == "two"
    assert await catalog.ready([stalled, card], 0.0) == ["two", "one"]


async def test_a_model_once_ready_is_found_while_its_workers_are_away(anyio_backend):
    """Keep the model even before its first request: the router decides whether a request waits."""
    card, blobs = served("one")
    other = served("two")[0]
    catalog = Catalog(FakeRouter(saying("x"), [other], blobs), InProcessPool())
    assert await catalog.ready([card, other], LIMIT_S) == ["one", "two"]
    assert (await catalog.get("one")).card.name == "one"


async def test_a_load_after_a_network_error_is_retried(anyio_backend, caplog):
    card, blobs = served("one")
    router, broken = FakeRouter(saying("x"), [card], blobs), 2

    async def blob(digest):
        nonlocal broken
        if broken:
            broken -= 1
            raise ServiceError(pb.UNAVAILABLE, "no router can be reached")
        return blobs[digest]

    router.blob = blob
    catalog = Catalog(router, InProcessPool())
    assert await catalog.ready([card], LIMIT_S) == []
    with pytest.raises(ServiceError, match="no router"):
        await catalog.get("one")
    assert await catalog.ready([card], LIMIT_S) == ["one"]
    assert caplog.text.count("could not be loaded: no router can be reached") == 1


async def test_models_beyond_the_loading_limit_are_loaded_on_request(anyio_backend, monkeypatch):
    monkeypatch.setattr("pdserve.gateway.catalog.MAX_LOADED", 1)
    card, blobs = served("one")
    other, others = served("two", generation={"temperature": 0.5})
    router = FakeRouter(saying("x"), [card, other], blobs)
    catalog = Catalog(router, InProcessPool())
    assert await catalog.ready([card, other], LIMIT_S) == ["one", "two"]
    router.blobs = others
    assert (await catalog.get("two")).card.name == "two"
    router.blobs = {}  # no files are loaded for a model without room
    assert await catalog.ready([card, other], LIMIT_S) == ["one", "two"]
    assert (await catalog.get("two")).card.name == "two"


async def test_ready_waits_for_the_tokenizer(make_http, monkeypatch):
    router, arrives = FakeRouter(saying("x")), asyncio.Event()
    blob = router.blob

    async def late(digest):
        await arrives.wait()
        return await blob(digest)

    router.blob = late
    client = make_http(router)
    monkeypatch.setattr("pdserve.gateway.readiness.LOAD_S", 0.01)
    early = await client.get("/ready")
    assert early.status_code == 503
    assert "no model's tokenizer is loaded yet" in early.text
    monkeypatch.setattr("pdserve.gateway.readiness.LOAD_S", LIMIT_S)
    arrives.set()
    assert (await client.get("/ready")).json()["models"] == ["tiny"]


async def test_concurrent_readiness_checks_are_shared(make_http):
    router, num_calls = FakeRouter(saying("x")), 0
    fleet = router.fleet

    async def slow():
        nonlocal num_calls
        num_calls += 1
        for _ in range(20):
            await asyncio.sleep(0)
        return await fleet()

    router.fleet = slow
    client = make_http(router)
    router.view = None
    replies = await asyncio.gather(*(client.get("/ready") for _ in range(10)))
    assert {reply.status_code for reply in replies} == {503}
    assert "no router can be reached" in replies[0].text
    assert num_calls < 5
    assert (await client.get("/ready")).status_code == 503


async def test_merge_closes_all_streams_when_one_fails(anyio_backend):
    closed = []

    async def endless(name):
        try:
            while True:
                yield name
                await asyncio.sleep(0)
        finally:
            closed.append(name)

    async def failing():
        yield "c"
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        [item async for item in merge([endless("a"), endless("b"), failing()])]
    assert sorted(closed) == ["a", "b"]


async def test_a_default_request_is_within_the_default_limits(make_http):
    settings = GatewaySettings()
    assert settings.queue_timeout_s < settings.request_timeout_s
    assert settings.max_unanswered <= settings.max_requests
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    reply = await make_http(saying("hello")).post(
        "/v1/chat/completions", json={"model": "tiny", "messages": HI}
    )
    assert reply.status_code == 200
