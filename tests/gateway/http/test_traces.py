"""The timing of a request: /v1/traces/{request_id}, and the gateway's span."""

import asyncio
from typing import Any

import pytest
from fakes.memory_tracer import CLIENT, MemoryTracer, own_id, parent_of, trace_of
from fakes.router import FakeRouter, failed, finished, placed, saying, tokens
from systems.eventually import eventually

from pdserve.gateway.metrics import request_metrics
from pdserve.gateway.metrics.request_metrics import timeline
from pdserve.protos import common_pb2 as pb

pytestmark = pytest.mark.anyio
REQUEST = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
BEFORE_DECODE = [
    "receive", "prepare", "route", "queue", "prefill", "transfer", "first_token", "return",
]  # fmt: skip


async def slow(router, start):
    """Play a request that takes the time of its phases, and some more on the way back."""
    yield placed(start)
    await asyncio.sleep(0.05)
    yield tokens(start, router.encode("a"), 0)
    yield tokens(start, router.encode("b"), 1, 0, pb.LENGTH)
    yield finished(start, remote=True, transport="tcp", cached_tokens=1)


async def test_phases_of_a_request(make_http):
    http = make_http(slow)
    answer = await http.post("/v1/completions", json=REQUEST)
    for name in (answer.headers["x-request-id"], answer.json()["id"]):
        reply = await http.get(f"/v1/traces/{name}")
        found = reply.json()
        assert reply.status_code == 200
        assert found["id"] == answer.json()["id"]
    assert found["model"] == "tiny"
    assert found["state"] == "ended"
    assert found["finish_reason"] == "length"
    assert (found["cached_tokens"], found["completion_tokens"]) == (1, 2)
    assert found["transport"] == "tcp"
    assert found["trace_id"] is None
    (attempt,) = found["attempts"]
    assert (attempt["attempt"], attempt["decode"], attempt["prefill"]) == ("61" * 16, "d:1", "")
    names = [phase["name"] for phase in found["phases"]]
    assert names == [*BEFORE_DECODE, "decode"]
    lengths = {phase["name"]: phase["duration_ms"] for phase in found["phases"]}
    assert (lengths["queue"], lengths["prefill"]) == (10, 20)
    assert (lengths["transfer"], lengths["first_token"]) == (3, 4)
    assert lengths["return"] > 0
    before = sum(lengths[name] for name in BEFORE_DECODE)
    assert before == pytest.approx(found["time_to_first_token_ms"], abs=0.01)
    assert sum(lengths.values()) == pytest.approx(found["total_ms"], abs=0.01)
    for one, following in zip(found["phases"], found["phases"][1:], strict=False):
        end = one["start_ms"] + one["duration_ms"]
        assert following["start_ms"] == pytest.approx(end, abs=0.01)


async def test_a_client_id_finds_its_latest_request(make_http):
    http = make_http(saying("x"))
    mine = {"x-request-id": "mine/1"}
    for prompt in ("one", "one two three"):
        reply = await http.post("/v1/completions", json=REQUEST | {"prompt": prompt}, headers=mine)
    found = (await http.get("/v1/traces/mine/1")).json()
    assert found["prompt_tokens"] == reply.json()["usage"]["prompt_tokens"]


async def test_a_key_cannot_see_traces_of_another(make_http):
    http = make_http(saying("x"), keys=("one", "other"))
    keys = [{"authorization": f"Bearer {name}"} for name in ("one", "other")]
    request = await http.post("/v1/completions", json=REQUEST, headers=keys[0])
    path = f"/v1/traces/{request.headers['x-request-id']}"
    assert (await http.get(path, headers=keys[0])).status_code == 200
    refused = await http.get(path, headers=keys[1])
    unknown = await http.get("/v1/traces/unknown", headers=keys[1])
    assert refused.status_code == unknown.status_code == 404
    assert refused.json()["error"]["param"] == "request_id"
    assert (await http.get(path)).status_code == 401


async def test_only_recent_traces_are_kept(make_http, monkeypatch):
    monkeypatch.setattr(request_metrics, "MAX_ENDED", 3)
    http = make_http(saying("x"))
    answers = [await http.post("/v1/completions", json=REQUEST) for _ in range(4)]
    paths = [f"/v1/traces/{answer.json()['id']}" for answer in answers]
    assert [(await http.get(path)).status_code for path in paths] == [404, 200, 200, 200]


async def test_traces_of_an_open_and_a_failed_request(make_http):
    go_on = asyncio.Event()

    async def play(router, start):
        yield placed(start)
        await go_on.wait()
        yield failed(start, pb.UNAVAILABLE)

    http = make_http(play)
    mine = {"x-request-id": "mine"}
    asking = asyncio.create_task(http.post("/v1/completions", json=REQUEST, headers=mine))

    async def state() -> Any:
        found = (await http.get("/v1/traces/mine")).json()
        return found if found.get("attempts") else None

    found = await eventually(state)
    assert (found["state"], found["finish_reason"]) == ("prefill", None)
    assert [phase["name"] for phase in found["phases"]] == ["receive", "prepare", "wait"]
    go_on.set()
    assert (await asking).status_code == 503
    found = await state()
    assert (found["state"], found["finish_reason"]) == ("ended", "UNAVAILABLE")
    assert found["time_to_first_token_ms"] is None


async def test_attempts_in_a_trace_are_bounded(make_http):
    async def play(router, start):
        for number in range(100):
            event = placed(start)
            event.placed.placement.attempt = number.to_bytes(16)
            event.placed.prefill_address = "p:1"
            yield event
            yield event  # a repeated event
        yield failed(start, pb.UNAVAILABLE)

    http = make_http(play)
    reply = await http.post("/v1/completions", json=REQUEST)
    found = (await http.get(f"/v1/traces/{reply.headers['x-request-id']}")).json()
    assert [int(one["attempt"], 16) for one in found["attempts"]] == list(range(16))
    assert found["attempts"][0]["prefill"] == "p:1"


def test_the_phases_are_those_of_the_first_token():
    """Place the phases between arrival and first token; leave unknown times out."""
    phases = pb.Phases(queue_s=3, route_s=1, prefill_s=4, transfer_s=0.5, first_token_s=0.25)
    found = timeline(0.5, 1.0, 10.0, 12.0, phases)
    starts = [0, 0.5, 1.5, 2.5, 4.5, 8.5, 9.0, 9.25, 10.5]
    assert [one.start_s for one in found] == starts
    assert [one.name for one in found] == [*BEFORE_DECODE, "decode"]
    assert found[-1].end_s == 12.5
    assert [one.name for one in timeline(0.5, None, None, 2.0, None)] == ["receive", "prepare"]
    assert [one.name for one in timeline(0.5, 1.0, None, 2.0, None)][-1] == "wait"


async def test_a_trace_context_is_continued(make_http):
    tracer = MemoryTracer()
    router = FakeRouter(slow)
    http = make_http(router, arrange=lambda service: setattr(service, "tracer", tracer))
    headers = {"traceparent": CLIENT, "tracestate": "a=b", "x-request-id": "mine"}
    answer = await http.post("/v1/completions", json=REQUEST, headers=headers)
    found = (await http.get("/v1/traces/mine")).json()
    spans = tracer.spans()
    span = spans["request"]
    context = f"00-{CLIENT[3:35]}-{own_id(span)}-01"
    assert answer.headers["traceparent"] == context
    assert (router.starts[0].trace_parent, router.starts[0].trace_state) == (context, "a=b")
    assert (trace_of(span), parent_of(span)) == (CLIENT[3:35], CLIENT[36:52])
    assert found["trace_id"] == CLIENT[3:35]
    assert parent_of(spans["request prepare"]) == own_id(span)
    said = dict(span.attributes)
    assert said["gen_ai.operation.name"] == "text_completion"
    assert said["gen_ai.request.model"] == "tiny"
    assert said["gen_ai.usage.input_tokens"] == found["prompt_tokens"]
    assert said["gen_ai.usage.output_tokens"] == 2
    assert said["gen_ai.response.finish_reasons"] == ("length",)
    assert "mine" in said["pdserve.request_ids"]
    for phase in found["phases"]:
        length = said[f"pdserve.phase.{phase['name']}_ms"]
        assert length == pytest.approx(phase["duration_ms"], abs=0.01)


async def test_a_failure_sets_the_status_of_the_span(make_http):
    tracer = MemoryTracer()
    http = make_http(saying("x"), arrange=lambda service: setattr(service, "tracer", tracer))
    reply = await http.post("/v1/completions", json=REQUEST | {"model": "none"})
    assert reply.status_code == 404
    assert reply.headers["traceparent"]
    assert tracer.spans()["request"].status.description == "MODEL_NOT_FOUND"


async def test_without_an_endpoint_the_trace_context_is_passed_on(make_http):
    """Pass it on to a router and workers that may have an endpoint; the answer names no span of the
    gateway."""
    router = FakeRouter(saying("x"))
    http = make_http(router)
    headers = {"traceparent": CLIENT, "tracestate": "a=b", "x-request-id": "mine"}
    answer = await http.post("/v1/completions", json=REQUEST, headers=headers)
    assert "traceparent" not in answer.headers
    assert (router.starts[0].trace_parent, router.starts[0].trace_state) == (CLIENT, "a=b")
    assert (await http.get("/v1/traces/mine")).json()["trace_id"] == CLIENT[3:35]
    plain = await http.post("/v1/completions", json=REQUEST, headers={"traceparent": "x"})
    assert "traceparent" not in plain.headers
    assert router.starts[1].trace_parent == ""
