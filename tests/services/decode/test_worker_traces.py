"""The spans of a prefill and a decode worker over real gRPC."""

import os
from collections.abc import Callable

from fakes.memory_tracer import CLIENT, MemoryTracer, own_id, parent_of, trace_of
from systems.worker_kit import Pair, prompt

from pdserve.protos import worker_pb2 as wire


def test_a_remote_prompt(with_pair: Callable[..., None]) -> None:
    tracer = MemoryTracer()

    async def test(pair: Pair) -> None:
        ids = prompt(40)
        attempt = pair.admit(ids, trace_parent=CLIENT, trace_state="a=b")
        admitted = await pair.decode.wait("admitted", attempt)
        named = {"trace_parent": CLIENT, "trace_state": "a=b", "request": "r"}
        pair.start_prefill(attempt, ids[:-1], admitted.ticket, **named)
        finished = await pair.decode.wait("finished", attempt)
        done = await pair.prefill.wait("done", attempt)
        spans = tracer.spans()
        decode, prefill = spans["decode"], spans["prefill"]
        assert {trace_of(span) for span in spans.values()} == {CLIENT[3:35]}
        assert parent_of(decode) == parent_of(prefill) == CLIENT[36:52]
        assert decode.context.trace_state.to_header() == "a=b"
        for span, request in ((decode, finished.request), (prefill, "r")):
            assert span.attributes["pdserve.request"] == request
            assert span.attributes["pdserve.attempt"] == attempt.hex()
            assert span.attributes["pdserve.transport"] == finished.transport
            assert span.status.is_unset
        assert prefill.attributes["pdserve.sent_bytes"] == done.sent_bytes > 0
        assert decode.attributes["pdserve.received_bytes"] == done.sent_bytes
        assert decode.attributes["pdserve.generated_tokens"] == 8
        assert parent_of(spans["decode first token"]) == own_id(decode)
        assert parent_of(spans["prefill compute"]) == own_id(prefill)
        phases = ("queue", "prefill", "transfer", "first token")
        lengths = [spans[f"decode {name}"] for name in phases if f"decode {name}" in spans]
        reported = finished.phases
        total = reported.queue_s + reported.prefill_s + reported.transfer_s + reported.first_token_s
        measured = sum(span.end_time - span.start_time for span in lengths) / 1e9
        assert abs(measured - total) < 0.001

    with_pair(test, tracer=tracer)


def test_a_local_prompt_and_one_that_is_cancelled(with_pair: Callable[..., None]) -> None:
    tracer = MemoryTracer()

    async def test(pair: Pair) -> None:
        local = pair.admit(prompt(40), remote=False, trace_parent=CLIENT)
        await pair.decode.wait("finished", local)
        waiting = pair.admit(prompt(30), trace_parent=CLIENT)  # for a prefill that never starts
        await pair.decode.wait("admitted", waiting)
        pair.decode.send(wire.DecodeCommand(cancel=wire.CancelAttempt(attempt=waiting)))
        untraced = pair.admit(prompt(20), remote=False)
        await pair.decode.wait("finished", untraced)
        await pair.at_rest()

    with_pair(test, tracer=tracer)
    spans = tracer.ended()
    local, waiting = (span for span in spans if span.name == "decode")
    assert local.attributes["pdserve.remote_prefill"] is False
    assert {span.name for span in spans if parent_of(span) == own_id(local)} >= {
        "decode prefill",
        "decode tokens",
    }
    assert waiting.status.description == "cancelled"
    assert waiting.attributes["pdserve.generated_tokens"] == 0


def test_a_prefill_that_cannot_send(with_pair: Callable[..., None]) -> None:
    tracer = MemoryTracer()

    async def test(pair: Pair) -> None:
        attempt = os.urandom(16)
        ticket = wire.Ticket(
            id=os.urandom(16),
            secret=os.urandom(32),
            decode_incarnation=pair.decode_worker.incarnation,
            data_address="127.0.0.1:9",
        )
        pair.start_prefill(attempt, prompt(20), ticket, trace_parent=CLIENT)
        await pair.prefill.wait("failed", attempt)
        await pair.at_rest()

    with_pair(test, tracer=tracer)
    span = tracer.spans()["prefill"]
    assert "127.0.0.1:9" in span.status.description
