"""The required contents of error answers over HTTP, and requests for tests of them."""

from typing import Any

import httpx

from pdserve.gateway.http.api import HttpLimits

HI = [{"role": "user", "content": "hi"}]
WIDE = HttpLimits(1 << 16, 1 << 18, 60, max_buffer_bytes=1 << 16, stall_s=60)
LARGE = HttpLimits(1 << 20, 1 << 24, 60, max_buffer_bytes=1 << 16, stall_s=60)
JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"


def check(
    reply: httpx.Response, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Check and return the OpenAI error object of an answer."""
    assert reply.status_code == status, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param, error
    assert error["code"] == code, error
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return error


def nested(depth: int) -> dict[str, Any]:
    """Return a JSON schema of objects within objects."""
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema
