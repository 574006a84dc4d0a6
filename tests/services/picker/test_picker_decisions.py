"""Choice of the endpoint for a request: by the policy, or any; for which tenant; and within what
time.
"""

import asyncio

import pytest
from fakes.proxy_stream import CHAT, MODELS, body, head, metadata, subset, tell
from fakes.scripted_picker import ScriptedPicker

from pdserve.protos import ext_proc_pb2 as pb
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.tenants import ApiKeys
from pdserve.services.picker import servicer as messages
from pdserve.services.picker.endpoints import KEEP_S, MAX_MISSES, has_port
from pdserve.services.picker.picker import NO_WORKER_S, ProxiedRequest

pytestmark = pytest.mark.anyio
PODS = ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]
PROMPT = b'{"prompt": "x"}'


async def endpoint_of(
    picker: ScriptedPicker, data: bytes = PROMPT, *, ends: bool = False, **headers: str
) -> str:
    """Return the endpoint of a request that stays open, or ends."""
    exchange = picker.exchange()
    found = await tell(exchange, head(CHAT | headers), body(data))
    if ends:
        exchange.close()
    return found.endpoints[0]


async def test_the_policy_decides() -> None:
    picker = ScriptedPicker(PODS)
    for host in ("10.0.0.2", "10.0.0.1"):
        picker.routers.hosts = [host]
        assert [(await endpoint_of(picker)).partition(":")[0] for _ in range(5)] == [host] * 5
    assert picker.decisions() == {"policy": 10}
    assert set(picker.routers.requests[0].hosts) == {"10.0.0.1", "10.0.0.2", "10.0.0.3"}


async def test_a_request_without_a_prompt_goes_to_the_least_loaded() -> None:
    picker = ScriptedPicker(PODS)
    open_ones = [await tell(picker.exchange(), head(MODELS, end_of_stream=True)) for _ in range(6)]
    assert sorted(one for reply in open_ones for one in reply.endpoints) == sorted(2 * PODS)
    assert picker.decisions() == {"no prompt": 6}
    assert await endpoint_of(picker, b"no json")
    assert picker.routers.requests == []


async def test_routers_that_are_down_or_hang_cost_a_bounded_time() -> None:
    picker = ScriptedPicker(PODS, limit_s=0.05)
    picker.routers.hangs = True
    async with asyncio.timeout(5):
        assert await endpoint_of(picker) in PODS
    picker.routers.num_connected = 0
    assert {await endpoint_of(picker) for _ in range(9)} == set(PODS)
    assert picker.decisions() == {"late": 1, "no router": 9}


async def test_a_router_that_fails() -> None:
    picker = ScriptedPicker(PODS)

    async def fails(request: object) -> None:
        raise ServiceError(1, "no answer")

    picker.routers.pick = fails
    assert await endpoint_of(picker) in PODS
    assert picker.decisions() == {"no router": 1}


async def test_gateways_separate_from_decode_workers() -> None:
    """A pool of gateways: nothing is tokenized for a while, and a conversation stays at one
    gateway.
    """
    picker = ScriptedPicker(PODS)
    assert await endpoint_of(picker, ends=True)
    for name in ("a talk", "another", "and another"):
        got = {await endpoint_of(picker, ends=True, **{"x-session-id": name}) for _ in range(5)}
        assert len(got) == 1
    assert picker.prompts.num_read == 1
    picker.now += NO_WORKER_S + 0.1
    await endpoint_of(picker)
    assert picker.prompts.num_read == 2


async def test_conversations_share_the_load() -> None:
    picker = ScriptedPicker(PODS)
    got = [await endpoint_of(picker, **{"x-session-id": "the same"}) for _ in range(30)]
    assert all(got.count(pod) <= 12 for pod in PODS)


async def test_a_single_endpoint_needs_no_router() -> None:
    picker = ScriptedPicker(PODS[:1])
    assert await endpoint_of(picker) == PODS[0]
    assert picker.prompts.num_read == 0


async def test_an_endpoint_that_was_skipped_is_the_last_choice() -> None:
    picker = ScriptedPicker(PODS, fallbacks=2)
    picker.routers.hosts = ["10.0.0.1"]
    exchange = picker.exchange()
    reply = await tell(exchange, head(CHAT), body(PROMPT))
    assert reply.endpoints[0] == PODS[0]
    served = metadata(messages.LB, x_gateway_destination_endpoint_served=reply.endpoints[1])
    response = pb.ProcessingRequest(response_headers=pb.HttpHeaders(), metadata_context=served)
    await exchange.take(response)
    exchange.close()
    assert await endpoint_of(picker) != PODS[0]
    picker.now += 6
    assert await endpoint_of(picker) == PODS[0]


async def test_a_request_counts_until_its_stream_ends() -> None:
    picker = ScriptedPicker(PODS)
    exchange = picker.exchange()
    reply = await tell(exchange, head(CHAT), body(PROMPT))
    endpoint = picker.endpoints.get(reply.endpoints[0])
    assert endpoint.num_open == 1
    exchange.close()
    exchange.close()
    assert endpoint.num_open == 0


async def test_a_request_counts_where_it_was_served() -> None:
    picker = ScriptedPicker(PODS, fallbacks=1)
    picker.routers.hosts = ["10.0.0.1", "10.0.0.2"]
    exchange = picker.exchange()
    await tell(exchange, head(CHAT), body(PROMPT))

    def counts() -> list[int]:
        return [endpoint.num_open for endpoint in picker.endpoints.candidates(None)]

    assert counts() == [1, 0, 0]
    for address, expected in (
        (PODS[0], [1, 0, 0]),
        ("10.9.9.9:1", [1, 0, 0]),  # an unknown endpoint
        (PODS[1], [0, 1, 0]),
        (PODS[2], [0, 0, 1]),  # which was not on the list
    ):
        served = metadata(messages.LB, x_gateway_destination_endpoint_served=address)
        response = pb.ProcessingRequest(response_headers=pb.HttpHeaders(), metadata_context=served)
        await exchange.take(response)
        assert counts() == expected
    exchange.close()
    assert counts() == [0, 0, 0]


# --- tenants


async def test_salts_equal_those_of_the_gateway() -> None:
    keys = ApiKeys(["one", "two"])
    picker = ScriptedPicker(PODS, keys=keys)
    picker.routers.hosts = ["10.0.0.1"]
    await endpoint_of(picker, authorization="Bearer one")
    await endpoint_of(picker, **{"x-api-key": "two"})
    salts = [request.cache_salt for request in picker.routers.requests]
    assert salts == [keys.tenant(f"Bearer {name}").salt for name in ("one", "two")]
    assert salts[0] != salts[1]
    assert [request.tenant for request in picker.routers.requests] == [
        keys.tenant(f"Bearer {name}").id for name in ("one", "two")
    ]


async def test_nothing_is_tokenized_for_a_wrong_key() -> None:
    """The gateway will refuse it; the head is answered without waiting for the body."""
    picker = ScriptedPicker(PODS, keys=ApiKeys(["one"]))
    for headers in ({}, {"authorization": "Bearer three"}):
        exchange = picker.exchange()
        assert len(await exchange.take(head(CHAT | headers))) == 1
        (answer,) = await exchange.take(body(PROMPT))
        assert answer.request_body.response.body_mutation.streamed_response.body == PROMPT
    assert picker.prompts.num_read == 0
    assert picker.decisions() == {"wrong key": 2}


# --- limits


async def test_a_body_that_is_too_long_is_passed_on_as_it_arrives() -> None:
    picker = ScriptedPicker(PODS, max_body_bytes=1000)
    exchange = picker.exchange()
    assert await exchange.take(head(CHAT)) == []
    assert await exchange.take(body(b"{" * 900, last=False)) == []
    reply = await tell(exchange, body(b"x" * 200, last=False), body(b"y" * 5000))
    assert reply.endpoints
    assert reply.passed == b"{" * 900 + b"x" * 200 + b"y" * 5000
    assert reply.ended
    assert picker.bodies.share.total == 0
    assert picker.prompts.num_read == 0


async def test_the_total_size_of_bodies_is_bounded() -> None:
    picker = ScriptedPicker(PODS, max_body_bytes=1000, max_bodies_bytes=1500)
    waiting = [picker.exchange() for _ in range(3)]
    for exchange in waiting[:2]:
        await exchange.take(head(CHAT))
        assert await exchange.take(body(b"{" * 700, last=False)) == []
    await waiting[2].take(head(CHAT))
    reply = await tell(waiting[2], body(b"{" * 700, last=False))
    assert reply.endpoints
    for exchange in waiting:
        exchange.close()
    assert picker.bodies.share.total == 0


# --- endpoints


def test_an_empty_list_of_names_is_ignored_for_a_moment() -> None:
    picker = ScriptedPicker(PODS)
    for _ in range(MAX_MISSES - 1):
        picker.endpoints.set_resolved([])
        assert len(picker.endpoints.candidates(None)) == 3
    picker.endpoints.set_resolved([])
    assert picker.endpoints.candidates(None) == []


async def test_requests_spread_over_endpoints_named_only_by_hints() -> None:
    picker = ScriptedPicker(None)
    hint = subset(PODS)
    for _ in range(30):
        await tell(picker.exchange(), head(MODELS, end_of_stream=True, context=hint))
        picker.now += KEEP_S / 10
    assert [picker.endpoints.get(pod).num_open for pod in PODS] == [10, 10, 10]


def test_endpoints_of_hints_are_forgotten() -> None:
    """They are forgotten once no hint names them, but not while a request is open there."""
    picker = ScriptedPicker(None)
    (busy,) = picker.endpoints.candidates(["10.1.0.0:80"])
    busy.sent(picker.now)
    for number in range(1000):
        picker.endpoints.candidates([f"10.0.{number % 250}.{number // 250}:80", PODS[0]])
        picker.now += 1
    assert KEEP_S <= len(picker.endpoints) - 2 <= KEEP_S + 2
    assert picker.endpoints.get(busy.address) is busy
    assert picker.endpoints.get(PODS[0]) is not None


@pytest.mark.parametrize("address", ["10.0.0.1:80", "[fd00::1]:80", "pod:80"])
def test_valid_addresses(address: str) -> None:
    assert has_port(address)


@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::1", ":80", "pod:", "[fd00::1]", "", "a:b"])
def test_invalid_addresses(address: str) -> None:
    assert not has_port(address)


def test_the_path_is_without_query_and_slash() -> None:
    for path in ("/v1/completions", "/v1/completions/", "/v1/completions?x=/"):
        assert ProxiedRequest({":path": path}, b"", None).path == "/v1/completions"
