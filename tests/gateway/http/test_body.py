"""Parsing of JSON bodies, and early refusal of expensive ones."""

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from pdserve.gateway.caller import Caller
from pdserve.gateway.http.api import HttpLimits
from pdserve.gateway.http.body import MAX_VALUES, SMALL_BYTES, BodyReader, num_values, parse_object
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.tenants import Tenant


@pytest.mark.parametrize("item", [b"0", b'""', b"[]", b"{}", b'{"a":0}'])
def test_a_body_with_too_many_values_is_refused(item: bytes) -> None:
    body = b'{"tokens": [' + b",".join([item] * (MAX_VALUES + 1)) + b"]}"
    with pytest.raises(ServiceError, match=f"more than {MAX_VALUES} values"):
        num_values(body)


def test_a_long_text_is_one_value() -> None:
    text = "so, and so, " * 40_000
    body = b'{"prompt": "' + text.encode() + b'"}'
    assert num_values(body) <= MAX_VALUES
    assert parse_object(body) == {"prompt": text}


def test_the_longest_token_prompt_is_accepted() -> None:
    body = b'{"prompt": [' + b",".join([b"7"] * (MAX_VALUES // 2)) + b"]}"
    assert num_values(body) <= MAX_VALUES
    assert len(parse_object(body)["prompt"]) == MAX_VALUES // 2


def test_a_key_counts_as_a_value() -> None:
    body = b"{" + b",".join([b'"a":0'] * (MAX_VALUES // 2 + 1)) + b"}"
    with pytest.raises(ServiceError, match="values"):
        num_values(body)


def asking(tenant: Tenant, body: bytes) -> Request:
    """A request whose body has arrived."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request(
        {
            "type": "http", "headers": [(b"content-type", b"application/json")],
            "state": {"caller": Caller("id", tenant=tenant)},
        },
        receive,
    )  # fmt: skip


def reader(max_bodies_bytes: int) -> BodyReader:
    return BodyReader(HttpLimits(1 << 20, max_bodies_bytes, 10.0, 1 << 16, 10.0))


@pytest.mark.anyio
async def test_bodies_of_tenants_are_parsed_in_turn(anyio_backend: str) -> None:
    bodies, parsed = reader(1 << 20), list[str]()

    async def read(tenant: Tenant) -> None:
        await bodies.read(asking(tenant, body), lambda body: parsed.append(tenant.name))

    body = b'{"prompt": "' + b"x" * SMALL_BYTES + b'"}'
    flood, other = (Tenant(name, name.encode(), b"") for name in ("flood", "other"))
    await asyncio.gather(*(read(flood) for _ in range(20)), read(other), read(other))
    assert len(parsed) == 22
    assert "other" not in parsed[6:]


@pytest.mark.anyio
async def test_parsed_values_count_as_bytes(anyio_backend: str) -> None:
    bodies, tenant = reader(1 << 16), Tenant("a", b"a", b"")
    numbers = b'{"tokens": [' + b",".join([b"7"] * 5000) + b"]}"
    with pytest.raises(ServiceError, match="too many request bodies"):
        await bodies.read(asking(tenant, numbers), dict)
    text = b'{"prompt": "' + b"7" * len(numbers) + b'"}'
    assert await bodies.read(asking(tenant, text), dict)
