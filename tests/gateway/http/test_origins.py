"""A server without keys that listens on this machine only refuses pages of other origins."""

import pytest
from fakes.router import saying

pytestmark = pytest.mark.anyio
REQUEST = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


CALLERS = [
    ("localhost:8000", None, 200),
    ("127.0.0.1", None, 200),
    ("[::1]:8000", None, 200),
    ("127.8.9.1:1", "http://localhost:3000", 200),
    ("app.localhost", "http://127.0.0.1:8000", 200),
    ("evil.example", None, 403),  # a name that resolves to 127.0.0.1
    ("evil.example:8000", "http://evil.example:8000", 403),
    ("localhost.evil.example", None, 403),
    ("10.0.0.1", None, 403),
    ("", None, 403),
    ("[", None, 403),
    ("localhost", "http://[", 403),
    ("localhost", "https://evil.example", 403),
    ("localhost", "https://localhost.evil.example", 403),
    ("localhost", "null", 403),
    ("localhost", "https://chat.example", 403),
]


async def test_allowed_callers(make_http, subtests):
    client = make_http(saying("x"), local=True)
    for host, origin, status in CALLERS:
        with subtests.test(host=host, origin=origin):
            headers = {"host": host} | ({} if origin is None else {"origin": origin})
            reply = await client.post(CHAT, json=REQUEST, headers=headers)
            assert reply.status_code == status
            assert (await client.get("/health", headers=headers)).status_code == status
            if status == 403:
                assert reply.json()["error"]["code"] == "forbidden"


async def test_an_origin_may_be_allowed(make_http):
    page = "https://chat.example"
    client = make_http(saying("x"), local=True, allowed_origins=[page])
    for origin, status in ((page, 200), ("https://other.example", 403)):
        headers = {"host": "localhost", "origin": origin}
        reply = await client.post(CHAT, json=REQUEST, headers=headers)
        assert reply.status_code == status
        assert reply.headers.get("access-control-allow-origin") == (page if status == 200 else None)
        if status == 200:
            shown = reply.headers["access-control-expose-headers"]
            assert {"x-request-id", "request-id", "retry-after"} <= set(shown.split(", "))
    ask = {"host": "localhost", "origin": page, "access-control-request-method": "POST"}
    request = await client.options(CHAT, headers=ask)
    assert (request.status_code, request.headers["access-control-allow-origin"]) == (200, page)


async def test_cors_is_closed_by_default(make_http):
    client = make_http(saying("x"))
    reply = await client.post(CHAT, json=REQUEST, headers={"origin": "https://a.example"})
    assert reply.status_code == 200, (
        "a server on the network has keys or trusts it, and checks no origins"
    )
    assert "access-control-allow-origin" not in reply.headers


async def test_a_page_needs_a_key_if_keys_are_set(make_http):
    page = "https://chat.example"
    client = make_http(saying("x"), keys=("k",), local=True, allowed_origins=[page])
    ask = {"host": "any.example", "origin": page, "access-control-request-method": "POST"}
    assert (await client.options(CHAT, headers=ask)).status_code == 200
    headers = {"host": "any.example", "origin": page}
    refused = await client.post(CHAT, json=REQUEST, headers=headers)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == page, (
        "the page must be able to read the refusal"
    )
    shown = refused.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= set(shown)
    headers["authorization"] = "Bearer k"
    assert (await client.post(CHAT, json=REQUEST, headers=headers)).status_code == 200
