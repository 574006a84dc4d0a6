"""The endpoint picker protocol of the Gateway API Inference Extension, over a stub of a stream.

Each test names the case or rule that it covers, of the extension at 84436a96b9e6 (2026-08):
conformance/tests, pkg/lwepp/handlers (the picker that its conformance tests run), and the text of
docs/proposals/004-endpoint-picker-protocol. Requirements for a Gateway or a cluster are not
covered here.
"""

import json
from collections import Counter

import pytest
from fakes.proxy_stream import (
    BUFFERED,
    CHAT,
    MODELS,
    TRAILERS,
    Told,
    body,
    head,
    metadata,
    set_headers,
    subset,
    tell,
)
from fakes.scripted_picker import ScriptedPicker

from pdserve.protos import ext_proc_pb2 as pb
from pdserve.services.picker import servicer as messages

pytestmark = pytest.mark.anyio
PODS = ["10.0.0.1:8080", "10.0.0.2:8080", "10.0.0.3:8080"]
PROMPT = b'{"model": "tiny", "prompt": "Write as if you were a critic: San Francisco"}'


async def ask(
    picker: ScriptedPicker,
    context: pb.FilterMetadata | None = None,
    prompt: bytes = PROMPT,
    **headers: str,
) -> Told:
    """Send a POST whose body comes in one piece."""
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    exchange = picker.exchange()
    reply = await tell(exchange, head(CHAT | named, context=context), body(prompt))
    exchange.close()
    return reply


def prompts(num: int) -> list[bytes]:
    """Return prompts of several conversations: equal ones stay together."""
    return [b'{"model": "tiny", "prompt": "%d"}' % number for number in range(num)]


# --- conformance/tests


async def test_gateway_following_epp_routing() -> None:
    """GatewayFollowingEPPRouting: one designated pod, two, all."""
    picker = ScriptedPicker(PODS, conformance_headers=True)
    for designated in (PODS[2:], PODS[:2], PODS):
        ips = ",".join(one.partition(":")[0] for one in designated)
        got = Counter()
        for prompt in prompts(30):
            reply = await ask(picker, prompt=prompt, test_epp_endpoint_selection=ips)
            got.update(reply.endpoints)
        assert set(got) == set(designated)


async def test_gateway_following_epp_routing_dp() -> None:
    """GatewayFollowingEPPRoutingWithDataParallelism: several ports of a pod are separate
    endpoints; an address without a port allows all of them.
    """
    ports = (3000, 3002, 3004)
    picker = ScriptedPicker(
        [f"10.0.0.{n}:{port}" for n in (1, 2, 3) for port in ports], conformance_headers=True
    )
    for request, allowed in (
        ("10.0.0.2", {f"10.0.0.2:{port}" for port in ports}),
        ("10.0.0.1,10.0.0.3:3002", {f"10.0.0.1:{port}" for port in ports} | {"10.0.0.3:3002"}),
        ("10.0.0.2:3000,10.0.0.2:3004", {"10.0.0.2:3000", "10.0.0.2:3004"}),
    ):
        got = [
            one
            for prompt in prompts(60)
            for one in (
                await ask(picker, prompt=prompt, test_epp_endpoint_selection=request)
            ).endpoints
        ]
        assert set(got) == allowed


async def test_gateway_destination_endpoint_served() -> None:
    """GatewayDestinationEndpointServed: the endpoint that served is in the response's header."""
    picker = ScriptedPicker(PODS, conformance_headers=True)
    exchange = picker.exchange()
    await tell(exchange, head(CHAT), body(PROMPT))
    served = pb.ProcessingRequest(
        response_headers=pb.HttpHeaders(),
        metadata_context=metadata(
            messages.LB, x_gateway_destination_endpoint_served="10.0.0.2:8080"
        ),
    )
    (answer,) = await exchange.take(served)
    assert set_headers(answer) == {messages.TEST_SERVED: "10.0.0.2:8080"}


async def test_missing_served_metadata() -> None:
    """TestHandleResponseHeaders_MissingEnvoyLBMetadata, _MissingDestinationEndpointServedKey."""
    picker = ScriptedPicker(PODS, conformance_headers=True)
    for context in (None, metadata(messages.LB, other="x")):
        exchange = picker.exchange()
        await tell(exchange, head(CHAT), body(PROMPT))
        message = pb.ProcessingRequest(response_headers=pb.HttpHeaders(), metadata_context=context)
        (answer,) = await exchange.take(message)
        assert set_headers(answer)[messages.TEST_SERVED].startswith("fail: ")


async def test_a_response_is_not_changed() -> None:
    """TestHandleResponseHeaders_ForwardsOriginalHeaders, without the headers of the tests."""
    exchange = ScriptedPicker(PODS).exchange()
    await tell(exchange, head(CHAT), body(PROMPT))
    (answer,) = await exchange.take(pb.ProcessingRequest(response_headers=pb.HttpHeaders()))
    assert answer == pb.ProcessingResponse(response_headers=pb.HeadersResponse())
    for number in range(3):
        part = pb.HttpBody(body=b"data: %d" % number, end_of_stream=number == 2)
        (answer,) = await exchange.take(pb.ProcessingRequest(response_body=part))
        streamed = answer.response_body.response.body_mutation.streamed_response
        assert (streamed.body, streamed.end_of_stream) == (part.body, part.end_of_stream)
    (answer,) = await exchange.take(pb.ProcessingRequest(response_trailers=pb.HttpTrailers()))
    assert answer.WhichOneof("response") == "response_trailers"


async def test_clients_choose_nothing_without_the_option() -> None:
    """The header of the tests, and the protocol's own, are ignored if a client sends them."""
    picker = ScriptedPicker(PODS)
    picker.routers.hosts = ["10.0.0.3"]
    reply = await ask(
        picker,
        test_epp_endpoint_selection="10.0.0.1",
        x_gateway_destination_endpoint="10.0.0.1:8080",
    )
    assert reply.endpoints == ["10.0.0.3:8080"]


# --- pkg/lwepp/handlers


async def test_round_robin_without_a_prompt() -> None:
    """TestHandleRequestHeaders_RoundRobin."""
    picker = ScriptedPicker(PODS[:2])
    got = []
    for _ in range(4):
        exchange = picker.exchange()
        got += (await tell(exchange, head(MODELS, end_of_stream=True))).endpoints
        exchange.close()
        picker.now += 60
    assert got[0] != got[1]
    assert got[:2] == got[2:]


async def test_no_pods() -> None:
    """TestHandleRequestHeaders_NoPods; 503 as the protocol says, in the shape of the API."""
    reply = await ask(ScriptedPicker([]))
    assert (reply.endpoints, reply.status) == ([], 503)
    (answer,) = reply.answers
    assert json.loads(answer.immediate_response.body)["error"]["message"] == "no endpoint is ready"
    assert set_headers(answer)["retry-after"] == "1"


@pytest.mark.parametrize(
    ("hint", "allowed"),
    [
        pytest.param(["10.0.0.3:8080"], PODS[2:], id="FilteringViaFilterMetadata"),
        pytest.param("10.0.0.2:8080,10.0.0.3:8080", PODS[1:], id="_StringValue"),
        pytest.param(
            "  10.0.0.2:8080 ,  ,  10.0.0.3:8080  ", PODS[1:], id="MalformedWhitespaceTrimming"
        ),
        pytest.param(
            ["10.0.0.2:8080, 10.0.0.3:8080"], PODS[1:], id="MixedArrayAndCommaStringElements"
        ),
        pytest.param([], [], id="SubsetFilterEmptyReturnsNoPods"),
        pytest.param("192.168.1.1:8080", [], id="StringMetadataNoMatchesReturnsNoPods"),
        pytest.param("10.0.0.1:3000", [], id="PortAwareFiltering: no matching port"),
        pytest.param("10.0.0.1", PODS[:1], id="PortAwareFiltering: an address alone"),
    ],
)
async def test_subset_hint(hint: str | list[str], allowed: list[str]) -> None:
    """TestHandleRequestHeaders_*: only endpoints of the list, 503 if none of them is ready."""
    picker = ScriptedPicker(PODS)
    got = set()
    for prompt in prompts(20):
        reply = await ask(picker, subset(hint), prompt)
        got.update(reply.endpoints)
        assert reply.status == (0 if allowed else 503)
    assert got == set(allowed)


async def test_other_metadata_is_no_hint() -> None:
    """TestHandleRequestHeaders_NoSubsetMetadataReturnsAllPods, _MetadataNamespaceEmpty..."""
    picker = ScriptedPicker(PODS)
    for context in (None, metadata(messages.HINT, some_other_key="val")):
        got = {(await ask(picker, context, prompt)).endpoints[0] for prompt in prompts(30)}
        assert got == set(PODS)


async def test_the_test_header_counts_before_the_hint() -> None:
    """TestHandleRequestHeaders_HeaderTakesPrecedenceOverMetadata."""
    picker = ScriptedPicker(PODS[1:], conformance_headers=True)
    reply = await ask(picker, subset(PODS[1:]), test_epp_endpoint_selection="10.0.0.2")
    assert reply.endpoints == ["10.0.0.2:8080"]


async def test_the_head_waits_for_the_body() -> None:
    """TestProcess_DeferredHeaderMutationOnStreamingBody."""
    exchange = ScriptedPicker(PODS[:1]).exchange()
    assert await exchange.take(head(CHAT)) == []
    reply = await tell(exchange, body(PROMPT))
    assert reply.kinds == ["request_headers", "request_body"]
    assert reply.endpoints == PODS[:1]
    assert not reply.answers[1].request_body.response.HasField("header_mutation")


# --- the protocol's text


async def test_without_names_the_hint_decides() -> None:
    picker = ScriptedPicker(None)
    reply = await ask(picker, subset(["10.9.9.9:1"]))
    assert reply.endpoints == ["10.9.9.9:1"]
    assert (await ask(picker)).status == 503
    assert (await ask(picker, subset(["10.9.9.9"]))).status == 503  # no port


async def test_fallbacks_are_a_list() -> None:
    """The header is <ip:port>,<ip:port>,... with the best first."""
    picker = ScriptedPicker(PODS, fallbacks=1)
    picker.routers.hosts = ["10.0.0.2", "10.0.0.3", "10.0.0.1"]
    assert (await ask(picker)).endpoints == ["10.0.0.2:8080", "10.0.0.3:8080"]
    assert (await ask(picker, subset([PODS[0]]))).endpoints == [PODS[0]]


async def test_a_request_that_the_router_would_refuse() -> None:
    """The answer is 429."""
    picker = ScriptedPicker(PODS)
    picker.routers.overloaded = True
    reply = await ask(picker)
    assert (reply.endpoints, reply.status) == ([], 429)
    assert set_headers(reply.answers[0])["retry-after"] == "1"


async def test_a_body_is_passed_on_unchanged_in_order() -> None:
    """FULL_DUPLEX_STREAMED, in pieces of at most 64 KiB."""
    picker = ScriptedPicker(PODS)
    picker.routers.hosts = ["10.0.0.2"]
    parts = [b'{"a": "' + bytes([65 + n]) * 30_000 for n in range(7)] + [b"z" * 200_000 + b'"}']
    exchange = picker.exchange()
    sent = [body(part, last=part is parts[-1]) for part in parts]
    reply = await tell(exchange, head(CHAT), *sent)
    assert reply.passed == b"".join(parts)
    assert reply.ended
    assert reply.kinds[0] == "request_headers"
    assert bytes(picker.routers.requests[0].prompt_ids) == reply.passed


async def test_a_body_that_ends_with_trailers() -> None:
    exchange = ScriptedPicker(PODS).exchange()
    reply = await tell(exchange, head(CHAT), body(PROMPT, last=False), TRAILERS)
    assert reply.kinds == ["request_headers", "request_body", "request_trailers"]
    assert reply.passed == PROMPT
    assert not reply.ended
    assert reply.endpoints


async def test_a_buffered_body() -> None:
    """BUFFERED: the head is answered at once, the decision comes with the body."""
    picker = ScriptedPicker(PODS)
    picker.routers.hosts = ["10.0.0.2"]
    exchange = picker.exchange()
    (answer,) = await exchange.take(head(CHAT, mode=BUFFERED))
    assert answer == pb.ProcessingResponse(request_headers=pb.HeadersResponse())
    reply = await tell(exchange, body(PROMPT))
    assert reply.kinds == ["request_body"]
    assert reply.endpoints == ["10.0.0.2:8080"]
    assert reply.passed == b""


@pytest.mark.parametrize("mode", [pb.NONE, pb.STREAMED, pb.BUFFERED_PARTIAL])
async def test_modes_in_which_only_the_head_can_name_an_endpoint(mode: pb.BodySendMode) -> None:
    exchange = ScriptedPicker(PODS).exchange()
    reply = await tell(exchange, head(CHAT, mode=mode))
    assert reply.endpoints
    if mode != pb.NONE:
        (answer,) = await exchange.take(body(PROMPT))
        assert answer == pb.ProcessingResponse(request_body=pb.BodyResponse())


async def test_a_proxy_that_only_observes_gets_no_answer() -> None:
    message = head(CHAT)
    message.observability_mode = True
    assert await ScriptedPicker(PODS).exchange().take(message) == []


async def test_nothing_is_sent_after_a_refusal() -> None:
    exchange = ScriptedPicker([]).exchange()
    reply = await tell(exchange, head(CHAT), body(PROMPT, last=False), body(b"", last=True))
    assert reply.kinds == ["immediate_response"]
