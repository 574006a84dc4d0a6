"""Rate limits of a key, and the headers that report them."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fakes.router import FakeRouter, saying
from starlette.types import ASGIApp

from pdserve.services.common.rate_limits import RateLimits, RateSettings

pytestmark = pytest.mark.anyio
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def ask(make_app: Callable[..., ASGIApp]) -> Callable[..., Any]:
    """A client of a gateway with these limits and the keys "one" and "two"."""

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
    assert (await post("two")).status_code == 200, "another key must have a separate limit"


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


async def test_without_limits_nothing_is_counted(ask: Any) -> None:
    post = ask(RateSettings())
    for _ in range(5):
        answer = await post("one")
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
