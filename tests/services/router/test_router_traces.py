"""The router's spans, between the gateway's and those of the workers."""

from typing import Any

import pytest
from fakes.memory_tracer import CLIENT, MemoryTracer, own_id, parent_of, trace_of
from systems.cluster_secret import open_channel

from pdserve.protos import common_pb2 as pb
from pdserve.protos import router_pb2 as rpc
from pdserve.protos.router_pb2_grpc import RouterStub

pytestmark = pytest.mark.anyio
SHORT, LONG = list(range(20)), list(range(600))


async def test_workers_get_the_router_s_span(make_cluster: Any) -> None:
    tracer = MemoryTracer()
    cluster = await make_cluster(tracer)
    decode, prefill = await cluster.decode(), await cluster.prefill()
    gateway = await cluster.gateway()
    await gateway.start("r", LONG, trace_parent=CLIENT, trace_state="a=b")
    finished = await gateway.end("r")
    placed = gateway.of("r", "placed")[0]
    assert placed.prefill_address == prefill.address
    assert 0 <= finished.phases.route_s <= finished.phases.queue_s
    span = tracer.spans()["route"]
    assert (trace_of(span), parent_of(span)) == (CLIENT[3:35], CLIENT[36:52])
    context = f"00-{trace_of(span)}-{own_id(span)}-01"
    (admit,), (start,) = decode.of("admit"), prefill.of("start")
    assert (admit.start.trace_parent, admit.start.trace_state) == (context, "a=b")
    assert (start.trace_parent, start.trace_state, start.request) == (context, "a=b", "r")
    assert span.attributes["pdserve.request"] == "r"
    assert span.attributes["pdserve.decode"] == decode.address
    assert span.attributes["pdserve.prefill"] == prefill.address
    attempt = next(event for event in span.events if event.name == "attempt")
    assert attempt.attributes["attempt"] == admit.attempt.hex()
    assert "first token" in [event.name for event in span.events]


async def test_a_second_try_is_an_event(make_cluster: Any) -> None:
    tracer = MemoryTracer()
    cluster = await make_cluster(tracer)
    await cluster.decode()
    prefill = await cluster.prefill()
    prefill.fail = 1
    gateway = await cluster.gateway()
    await gateway.start("r", LONG, trace_parent=CLIENT)
    await gateway.end("r")
    assert len({placed.placement.attempt for placed in gateway.of("r", "placed")}) == 2
    span = tracer.spans()["route"]
    names = [event.name for event in span.events]
    assert names == ["attempt", "attempt lost", "attempt", "first token"]
    assert "scripted failure" in span.events[1].attributes["reason"]
    assert span.attributes["pdserve.attempts"] == 2


async def test_the_next_issue_of_a_request_names_it_in_its_span(make_cluster: Any) -> None:
    tracer = MemoryTracer()
    cluster = await make_cluster(tracer)
    decode = await cluster.decode(hold_at=2)
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT, max_tokens=4, trace_parent=CLIENT)
    await gateway.until(lambda: len(gateway.ids("r")) == 2)
    placement = gateway.of("r", "placed")[-1].placement
    choices = [pb.ChoiceState(generated_ids=gateway.ids("r"))]
    again = await cluster.gateway(incarnation=gateway.incarnation)
    changed = {"epoch": 1, "placement": placement, "choices": choices, "trace_parent": CLIENT}
    await again.start("r", SHORT, max_tokens=4, **changed)
    await again.until(lambda: again.of("r", "placed"))
    decode.released.set()
    await again.end("r")
    first, second = (span for span in tracer.ended() if span.name == "route")
    assert [event.name for event in first.events][-1] == "issued again"
    for span in (first, second):
        assert span.attributes["pdserve.request"] == "r"
        assert span.attributes["gen_ai.request.model"]


async def test_no_span_without_a_parent(make_cluster: Any) -> None:
    """The gateway does not trace, or has not sampled the request."""
    tracer = MemoryTracer()
    cluster = await make_cluster(tracer)
    decode = await cluster.decode()
    gateway = await cluster.gateway()
    for name, parent in (("plain", ""), ("unsampled", CLIENT[:-1] + "0")):
        await gateway.start(name, SHORT, trace_parent=parent)
        await gateway.end(name)
    assert [admit.start.trace_parent for admit in decode.of("admit")] == ["", CLIENT[:-1] + "0"]
    assert tracer.spans() == {}


async def test_a_router_that_does_not_trace_passes_on_the_parent(make_cluster: Any) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT, trace_parent=CLIENT)
    await gateway.end("r")
    assert decode.of("admit")[0].start.trace_parent == CLIENT


async def test_generate_passes_on_the_parent_without_an_endpoint(make_cluster: Any) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    request = rpc.GenerateRequest(prompt_ids=SHORT, params=pb.SamplingParams(max_tokens=3))
    async with open_channel(cluster.router.address) as channel:
        call = RouterStub(channel).Generate(request, metadata=(("traceparent", CLIENT),))
        assert [r async for r in call]
    assert decode.of("admit")[0].start.trace_parent == CLIENT


@pytest.mark.parametrize("parent", [CLIENT, ""])
async def test_generate_begins_or_continues_a_trace(make_cluster: Any, parent: str) -> None:
    tracer = MemoryTracer()
    cluster = await make_cluster(tracer)
    await cluster.decode()
    params = pb.SamplingParams(max_tokens=3)
    request = rpc.GenerateRequest(prompt_ids=SHORT, params=params)
    metadata = (("traceparent", parent),) if parent else ()
    async with open_channel(cluster.router.address) as channel:
        assert [r async for r in RouterStub(channel).Generate(request, metadata=metadata)]
        refused = rpc.GenerateRequest(model="none", prompt_ids=SHORT, params=params)
        with pytest.raises(Exception, match="not served"):
            assert [r async for r in RouterStub(channel).Generate(refused)]
    spans = tracer.ended()
    generate = [span for span in spans if span.name == "generate"]
    routes = [span for span in spans if span.name == "route"]
    assert parent_of(generate[0]) == parent[36:52]
    assert [parent_of(span) for span in routes] == [own_id(span) for span in generate]
    assert [span.status.description for span in generate] == [None, "MODEL_NOT_FOUND"]
    assert generate[0].attributes["pdserve.request"] == routes[0].attributes["pdserve.request"]
