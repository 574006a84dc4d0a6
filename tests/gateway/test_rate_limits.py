"""Requests, tokens and seconds of text per key and minute."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_router import FakeRouter, saying
from starlette.types import ASGIApp

from pdserve.gateway.rate_limits import STORAGE_S, RateLimits, RateSettings
from pdserve.protos.common_pb2 import OVERLOADED
from pdserve.services.host.errors import ServiceError

pytestmark = pytest.mark.anyio
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def ask(make_app: Callable[..., ASGIApp]) -> Callable[..., Any]:
    """A client of a gateway with these limits, whose keys are "one" and "two"."""

    def make(settings: RateSettings) -> Callable[..., Any]:
        app = make_app(
            FakeRouter(saying("hello world")), keys=("one", "two"), rates=RateLimits(settings)
        )
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1"
        )

        async def post(key: str, **fields: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return await client.post("/v1/chat/completions", json=BODY | fields, headers=headers)

        return post

    return make


async def test_requests_of_a_key_are_limited(ask: Any) -> None:
    post = ask(RateSettings(requests=2))
    first = await post("one")
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert 0 < float(first.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
    assert "x-ratelimit-limit-tokens" not in first.headers
    assert (await post("one", stream=True)).headers["x-ratelimit-remaining-requests"] == "0"
    refused = await post("one")
    assert refused.status_code == 429
    assert refused.json()["error"]["message"] == "the limit of requests per minute is reached"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert (await post("two")).status_code == 200, "another key has its own"


async def test_tokens_of_prompt_and_answer_count(ask: Any) -> None:
    post = ask(RateSettings(tokens=1000))
    answer = await post("one")
    used = answer.json()["usage"]
    left = 1000 - used["prompt_tokens"]
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(left)
    again = await post("one")
    left -= used["completion_tokens"] + used["prompt_tokens"]
    assert used["completion_tokens"] > 0
    assert again.headers["x-ratelimit-remaining-tokens"] == str(left)


async def test_a_prompt_beyond_the_limit_is_refused(ask: Any) -> None:
    post = ask(RateSettings(tokens=3))
    refused = await post("one")
    assert refused.status_code == 429
    assert "tokens per minute" in refused.json()["error"]["message"]


async def test_seconds_of_text_are_limited(anyio_backend: str) -> None:
    rates = RateLimits(RateSettings(text_s=0.5))
    await rates.check_text(b"one")
    rates.text_spent(b"one", 0.2)
    await rates.close()
    await rates.check_text(b"one")
    rates.text_spent(b"one", 0.7)
    await rates.close()
    with pytest.raises(ServiceError, match="seconds of preparing texts") as caught:
        await rates.check_text(b"one")
    assert caught.value.code == OVERLOADED
    await rates.check_text(b"two")


async def test_without_limits_nothing_is_counted(ask: Any) -> None:
    post = ask(RateSettings())
    for _ in range(5):
        answer = await post("one")
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


def test_an_unknown_storage_is_refused() -> None:
    with pytest.raises(ValueError, match="--rate-storage nowhere") as caught:
        RateLimits(RateSettings(requests=1, storage="nowhere://:password@x"))
    assert "password" not in str(caught.value)


async def test_a_storage_that_is_down_limits_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, anyio_backend: str
) -> None:
    rates = RateLimits(RateSettings(requests=1))

    async def fail(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr("limits.aio.strategies.FixedWindowRateLimiter.hit", fail)
    monkeypatch.setattr("limits.aio.strategies.FixedWindowRateLimiter.get_window_stats", fail)
    for _ in range(3):
        await rates.count_request(b"one")
    assert (await rates.headers(b"one"))["x-ratelimit-remaining-requests"] == "1"
    assert caplog.text.count("rate limits are not counted: no route") == 1


async def test_a_storage_that_hangs_limits_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, anyio_backend: str
) -> None:
    rates = RateLimits(RateSettings(requests=1))

    async def hang(*_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr("limits.aio.strategies.FixedWindowRateLimiter.hit", hang)
    async with asyncio.timeout(10 * STORAGE_S):
        await rates.count_request(b"one")
    assert "rate limits are not counted: no answer within 0.5 s" in caplog.text
