"""Spans, the contexts in W3C's headers, and an unreachable collector."""

import logging
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from fakes.memory_tracer import CLIENT, MemoryTracer, own_id, parent_of, trace_of
from fakes.otlp_collector import OtlpCollector
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from systems.eventually import wait_until

from pdserve.services.common import tracing as module
from pdserve.services.common.options import ServerSettings
from pdserve.services.common.tracing import (
    MAX_EVENTS,
    MAX_QUEUED,
    NOWHERE,
    ExportingTracer,
    TraceContext,
    Tracer,
    context_of,
    exporter,
    tracing,
)

SETTINGS = ServerSettings()


def test_a_span_is_a_child_of_the_client_s_context() -> None:
    tracer = MemoryTracer()
    client = context_of({"traceparent": CLIENT, "tracestate": "vendor=1,other=2"})
    began = time.monotonic()
    span = tracer.begin("request", client, began, entry=True)
    inner = tracer.begin("route", span.context, began)
    inner.phase("queue", began, began + 0.25)
    inner.phase("nothing", began, began)
    inner.event("attempt", began + 0.5, pdserve__attempt="a")
    inner.set(gen_ai__request__model="m")
    inner.end()
    span.end("INTERNAL")
    assert span.context.state == inner.context.state == "vendor=1,other=2"
    spans = tracer.spans()
    request, route, queue = spans["request"], spans["route"], spans["route queue"]
    assert len(spans) == 3
    assert {trace_of(one) for one in spans.values()} == {CLIENT[3:35]}
    assert (parent_of(request), parent_of(route)) == (CLIENT[36:52], own_id(request))
    assert parent_of(queue) == own_id(route)
    assert queue.end_time - queue.start_time == pytest.approx(0.25e9, abs=1e3)
    assert abs(request.start_time - time.time_ns()) < 60e9
    assert dict(route.attributes) == {"gen_ai.request.model": "m"}
    assert dict(route.events[0].attributes) == {"pdserve.attempt": "a"}
    assert route.context.trace_state.to_header() == "vendor=1,other=2"
    assert (request.status.description, route.status.description) == ("INTERNAL", None)
    assert request.resource.attributes["service.name"] == "pdserve-test"


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "x",
        CLIENT[:-1],
        CLIENT.upper(),
        CLIENT + "-more",  # version 00 has no more fields
        "ff" + CLIENT[2:],
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
        "é" * 55,
    ],
)
def test_an_invalid_parent_is_ignored(parent: str) -> None:
    tracer = MemoryTracer()
    context = TraceContext(parent, "vendor=1")
    assert not tracer.begin("route", context, 0.0).recorded
    root = tracer.begin("request", context, 0.0, entry=True)
    root.end()
    (span,) = tracer.spans().values()
    assert span.parent is None
    assert root.context.state == ""  # it belonged to the parent


def test_a_later_version_and_an_invalid_state() -> None:
    tracer = MemoryTracer()
    later = tracer.begin("a", TraceContext("cc" + CLIENT[2:] + "-more", "bad\nstate"), 0.0)
    assert later.context.trace_id == CLIENT[3:35]
    assert later.context.parent.startswith("00-")
    assert later.context.state == ""
    tracer.close()


def test_sampling_follows_the_client_and_the_share() -> None:
    """A client's decision not to sample is kept; of the other traces the share is recorded,
    whichever side began them.
    """
    none, half = MemoryTracer(0.0), MemoryTracer(0.5)
    left_out = half.begin("a", TraceContext(CLIENT[:-2] + "00"), 0.0, entry=True)
    assert not left_out.recorded
    assert left_out.context.parent[:36] == CLIENT[:36]
    assert left_out.context.parent[-2:] == "00"
    assert not half.begin("b", left_out.context, 0.0).recorded
    for parent in (NOWHERE, TraceContext(CLIENT)):
        refused = none.begin("a", parent, 0.0, entry=True)
        assert not refused.recorded
        assert refused.context.parent[-2:] == "00"
    assert refused.context.trace_id == CLIENT[3:35]
    kept = sum(half.begin("a", NOWHERE, 0.0, entry=True).recorded for _ in range(400))
    assert 100 < kept < 300
    ids = [f"{number:032x}" for number in range(1, 401)]  # low ones are as likely as others
    clients = [TraceContext(f"00-{id_}-{CLIENT[36:52]}-01") for id_ in ids]
    first, again = (
        [half.begin("a", client, 0.0, entry=True).recorded for client in clients] for _ in range(2)
    )
    assert 100 < sum(first) < 300
    assert first == again  # a trace is recorded whole
    assert none.begin(
        "a", TraceContext(CLIENT), 0.0
    ).recorded  # begun by another process of the cluster
    none.close()
    half.close()


def test_events_are_bounded() -> None:
    tracer = MemoryTracer()
    span = tracer.begin("a", NOWHERE, 0.0, entry=True)
    for _ in range(MAX_EVENTS + 5):
        span.event("busy")
    span.end()
    assert len(tracer.spans()["a"].events) == MAX_EVENTS


def test_without_an_endpoint_nothing_is_imported_or_recorded(monkeypatch: Any) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    with tracing("gateway", SETTINGS) as tracer:
        span = tracer.begin("a", NOWHERE, 0.0, entry=True)
        assert (span.recorded, span.context) == (False, NOWHERE)
    code = (
        "import sys; import pdserve.gateway.main, pdserve.services.router.main, "
        "pdserve.services.decode, pdserve.services.prefill; "
        "sys.exit(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_client_s_context_is_passed_on_without_an_endpoint() -> None:
    """The context reaches processes that have an endpoint, within the sampling share."""
    client = TraceContext(CLIENT, "vendor=1")
    assert Tracer().begin("a", client, 0.0, entry=True).context == client
    assert Tracer(0.0).begin("a", client, 0.0, entry=True).context.parent == CLIENT[:-2] + "00"
    for parent in (TraceContext("x" * 55), TraceContext(CLIENT[:-1])):
        assert Tracer().begin("a", parent, 0.0, entry=True).context == NOWHERE
    assert Tracer().begin("a", client, 0.0).context == NOWHERE  # not a client's


def test_settings_that_disable_tracing_are_logged(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    with tracing("gateway", replace(SETTINGS, otlp_traces_endpoint="http://c:4318")) as tracer:
        assert not tracer.begin("a", NOWHERE, 0.0, entry=True).recorded
    assert "OTEL_TRACES_EXPORTER=none" in caplog.text
    caplog.clear()
    with tracing("gateway", SETTINGS):
        assert caplog.text == ""


def test_a_collector_gets_the_spans_before_the_process_ends() -> None:
    with OtlpCollector() as collector:
        settings = replace(SETTINGS, otlp_traces_endpoint=collector.url)
        with tracing("router", settings) as tracer:
            tracer.begin("a", NOWHERE, time.monotonic(), entry=True).end()
        (span,) = collector.spans
    assert (span.service, span.name, span.parent_id) == ("pdserve-router", "a", "")


def test_spans_waiting_for_a_collector_are_bounded() -> None:
    go_on, kept = threading.Event(), []

    class Stuck(InMemorySpanExporter):
        def export(self, spans: Any) -> Any:
            go_on.wait()
            kept.extend(spans)
            return super().export(spans)

    tracer = ExportingTracer("test", Stuck())
    for _ in range(3 * MAX_QUEUED):
        tracer.begin("a", NOWHERE, time.monotonic(), entry=True).end()
    go_on.set()
    tracer.close()
    assert MAX_QUEUED <= len(kept) <= MAX_QUEUED + 512  # one batch was in flight


@pytest.mark.parametrize("how", ["closed", "silent"])
def test_an_unreachable_collector(how: str, caplog: Any, monkeypatch: Any) -> None:
    """The collector costs no time, bounded memory, one line in the log, and no wait at the end."""
    monkeypatch.setattr(module, "EXPORT_S", 0.5)
    with socket.socket() as listener, caplog.at_level(logging.DEBUG, "pdserve"):
        listener.bind(("127.0.0.1", 0))
        if how == "silent":
            listener.listen(8)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces"
        tracer = ExportingTracer("test", exporter(url))
        for _ in range(2 * MAX_QUEUED):
            tracer.begin("a", NOWHERE, time.monotonic(), entry=True).end()
        wait_until(lambda: "does not accept traces" in caplog.text, "the warning")
        for _ in range(MAX_QUEUED):
            tracer.begin("a", NOWHERE, time.monotonic(), entry=True).end()
        began = time.monotonic()
        tracer.close()
        assert time.monotonic() - began < module.CLOSE_S / 2
    warnings = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(warnings) == 1


@pytest.mark.parametrize("answers", [True, False])
def test_the_log_shows_no_secret_of_the_url(answers: bool, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "EXPORT_S", 0.5)
    with OtlpCollector() as collector, caplog.at_level(logging.DEBUG):
        if not answers:
            collector.close()
        url = collector.url.replace("//", "//user:secret@") + "/v1/traces?token=secret"
        tracer = ExportingTracer("test", exporter(url))
        tracer.begin("a", NOWHERE, time.monotonic(), entry=True).end()
        tracer.close()
        assert len(collector.spans) == answers
    assert "secret" not in caplog.text
    assert (f"{collector.url}/v1/traces does not accept traces" in caplog.text) is not answers
