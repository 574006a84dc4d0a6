"""Preparing prompts: off the event loop, in bounded time, from blobs that are loaded once."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from eventually import LIMIT_S, eventually
from fake_router import FakeRouter, saying, served

from pdserve.gateway.catalog import Catalog, TextExecutor
from pdserve.gateway.keys import ApiKeys, read_key_file
from pdserve.gateway.merge import merge
from pdserve.gateway.settings import GatewaySettings
from pdserve.gateway.text.tokenizer import Tokenizer
from pdserve.protos import common_pb2 as pb
from pdserve.services.host.errors import ServiceError

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "hi"}]


async def test_a_slow_tokenizer_does_not_hold_up_the_loop(make_http, monkeypatch):
    encode = Tokenizer.encode_rendered
    slow, go_on = threading.Event(), threading.Event()

    def slowly(self, *args, **options):
        slow.set()
        assert go_on.wait(LIMIT_S / 2), "the loop was held up"
        return encode(self, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode_rendered", slowly)
    client = make_http(saying("hello"))
    asked = asyncio.create_task(client.post("/v1/chat/completions", json={"messages": HI}))
    await eventually(slow.is_set)
    for _ in range(5):
        assert (await client.get("/health")).status_code == 200
    assert not asked.done()
    go_on.set()
    assert (await asked).status_code == 200


async def test_preparing_is_bounded_in_time(anyio_backend):
    with ThreadPoolExecutor(1) as executor:
        pool = TextExecutor(executor, 0.05)
        with pytest.raises(ServiceError) as caught:
            await pool.run(lambda: time.sleep(0.2))
    assert caught.value.code == pb.UNAVAILABLE


async def test_two_names_of_one_tokenizer_load_it_once(anyio_backend):
    card, blobs = served("one")
    other = served("two")[0]
    router = FakeRouter(saying("x"), [card, other], blobs)
    with ThreadPoolExecutor(1) as executor:
        catalog = Catalog(router, TextExecutor(executor, 5))
        one, two, again = await asyncio.gather(*map(catalog.get, ("one", "two", "one")))
    assert one.text is two.text is again.text
    assert (one.card.name, two.card.name) == ("one", "two")


async def test_a_model_is_loaded_before_its_first_request(anyio_backend, caplog):
    card, blobs = served("one")
    broken = served("two")[0]
    broken.tokenizer_digest = "none"
    router = FakeRouter(saying("x"), [card, broken], blobs | {"none": b"{"})
    with ThreadPoolExecutor(1) as executor:
        catalog = Catalog(router, TextExecutor(executor, 5))
        for _ in range(2):
            await catalog.load(["one", "two"])
        assert [record.args[0] for record in caplog.records] == ["two"]
        router.blobs.clear()
        assert (await catalog.get("one")).text.template is not None
        router.blobs = blobs | {"none": b"{"}
        await catalog.load([])  # it has left, and comes back
        await catalog.load(["two"])
    assert [record.args[0] for record in caplog.records] == ["two", "two"]


@pytest.mark.parametrize("broken", ["tokenizer_digest", "template_digest"])
async def test_a_broken_blob_is_the_servers_fault(make_http, broken):
    card, blobs = served()
    blobs[getattr(card, broken)] = b"\xff{{"
    reply = await make_http(FakeRouter(saying("x"), [card], blobs)).post(
        "/v1/chat/completions", json={"messages": HI}
    )
    assert reply.status_code == 503


async def test_merge_closes_all_when_one_fails(anyio_backend):
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


def test_key_files(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\n one \n\ntwo\n")
    keys = ApiKeys(read_key_file(str(path)))
    assert [keys.admits(f"Bearer {key}") for key in ("one", "two", "# ours", "")] == [
        True, True, False, False,
    ]  # fmt: skip
    path.write_text("# none\n")
    with pytest.raises(ValueError, match="no API key"):
        read_key_file(str(path))
    with pytest.raises(ValueError, match="empty"):
        ApiKeys([""])
    assert ApiKeys(()).admits("")


async def test_a_default_request_passes_the_default_limits(make_http):
    settings = GatewaySettings()
    assert settings.queue_timeout_s < settings.request_timeout_s
    assert settings.max_unanswered <= settings.max_requests
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    reply = await make_http(saying("hello")).post("/v1/chat/completions", json={"messages": HI})
    assert reply.status_code == 200
