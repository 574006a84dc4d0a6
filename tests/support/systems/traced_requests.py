"""Requests of a client that measures the time to its first token, and checks of their traces."""

import http.client
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fakes.otlp_collector import CollectedSpan, OtlpCollector

from systems.eventually import wait_until

MODEL = "SmolLM2-135M-Instruct"
SERVICES = {
    "request": "pdserve-gateway",
    "route": "pdserve-router",
    "prefill": "pdserve-prefill",
    "decode": "pdserve-decode",
}
SKEW_S = 0.002  # between readings of one clock by several processes; a loop's own has milliseconds


@dataclass(frozen=True, slots=True)
class TracedAnswer:
    """One streamed answer as its client saw it, and its trace from /v1/traces."""

    request_id: str
    traceparent: str
    ttft_ms: float
    trace: dict[str, Any]

    @property
    def trace_id(self) -> str:
        return self.traceparent[3:35]

    @property
    def phases_ms(self) -> float:
        """Return their sum, until the first token."""
        phases = self.trace["phases"]
        return float(sum(one["duration_ms"] for one in phases if one["name"] != "decode"))


class TracedClient:
    """One connection for consecutive requests."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)

    def __enter__(self) -> "TracedClient":
        return self

    def __exit__(self, *exc: object) -> None:
        self._connection.close()

    def ask(self, prompt: str, max_tokens: int = 4, **headers: str) -> TracedAnswer:
        """Send a request; wait for the end of its answer, and for its trace."""
        request = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        body = json.dumps(request).encode()
        headers = {"content-type": "application/json", **headers}
        began = time.monotonic()
        self._connection.request("POST", "/v1/completions", body, headers)
        response = self._connection.getresponse()
        line = response.readline()
        ttft_ms = 1e3 * (time.monotonic() - began)
        assert response.status == 200, line
        assert json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
        response.read()
        name = response.headers["x-request-id"]
        traceparent = response.headers.get("traceparent", "")
        return TracedAnswer(name, traceparent, ttft_ms, self._trace(name))

    def _trace(self, name: str) -> dict[str, Any]:
        def ended() -> dict[str, Any] | None:
            self._connection.request("GET", f"/v1/traces/{name}")
            found: dict[str, Any] = json.loads(self._connection.getresponse().read())
            return found if found.get("state") == "ended" else None

        found: dict[str, Any] = wait_until(ended, name)
        return found


@dataclass(frozen=True, slots=True)
class Ways:
    """Milliseconds that no process spent on a request, by the clocks at both ends of a
    connection.
    """

    to_router: float
    to_decode: float
    back: float  # of the first token

    @property
    def total(self) -> float:
        return self.to_router + self.to_decode + self.back


def check_spans(collector: OtlpCollector, answer: TracedAnswer, parent_id: str = "") -> Ways:
    """Check the spans of a request whose prompt a prefill worker computed: they belong to four
    processes, are nested, in order, and agree with the client's answer.
    """
    spans = collector.trace(answer.trace_id, *SERVICES)
    named = {span.name: span for span in spans if span.name in SERVICES}
    request, route, prefill, decode = (named[name] for name in SERVICES)
    assert {name: span.service for name, span in named.items()} == SERVICES
    assert sum(span.name in SERVICES for span in spans) == 4
    assert request.span_id == answer.traceparent[36:52]
    assert request.parent_id == parent_id
    assert route.parent_id == request.span_id
    assert prefill.parent_id == decode.parent_id == route.span_id
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        around = by_id.get(span.parent_id)
        if around is not None:
            assert around.began - SKEW_S <= span.began <= span.ended <= around.ended + SKEW_S
    assert request.began <= route.began + SKEW_S
    assert route.began <= decode.began + SKEW_S
    assert decode.began <= prefill.began + SKEW_S
    parts = {span.name: span for span in spans}
    order = ["queue", "prefill", "transfer", "first token", "tokens"]
    _follow([parts[f"decode {name}"] for name in order])
    _follow([parts[f"prefill {name}"] for name in ("queue", "compute", "transfer")])
    assert parts["prefill compute"].ended <= parts["decode first token"].ended
    assert {span.error for span in spans} == {""}
    (attempt,) = answer.trace["attempts"]
    attempt_ids = [span.attributes["pdserve.attempt"] for span in (prefill, decode)]
    assert attempt_ids == [attempt["attempt"]] * 2
    assert {span.attributes["pdserve.request"] for span in named.values()} == {answer.trace["id"]}
    assert answer.request_id in request.attributes["pdserve.request_ids"]
    assert route.attributes["pdserve.decode"] == attempt["decode"]
    assert route.attributes["pdserve.prefill"] == attempt["prefill"]
    for phase in answer.trace["phases"]:
        length = request.attributes[f"pdserve.phase.{phase['name']}_ms"]
        assert abs(length - phase["duration_ms"]) < 0.01
    return _check_phases(answer.trace, parts)


def _check_phases(trace: dict[str, Any], parts: dict[str, CollectedSpan]) -> Ways:
    """Check that the client's figures equal each process's measurements, within a millisecond; its
    "return" is the time between their spans.
    """
    durations_ms = {phase["name"]: phase["duration_ms"] for phase in trace["phases"]}
    spent = {name: 1e3 * span.duration_s for name, span in parts.items()}
    for phase, span in (
        ("receive", "request receive"),
        ("prepare", "request prepare"),
        ("route", "route queue"),
        ("prefill", "decode prefill"),
        ("first_token", "decode first token"),
    ):
        assert abs(spent.get(span, 0.0) - durations_ms[phase]) < 1, phase
    # Waiting for blocks lies within the span of the transfer, and counts as queueing.
    waited = durations_ms["queue"] - spent["decode queue"]
    assert waited > -1
    assert abs(spent["decode transfer"] - durations_ms["transfer"] - waited) < 1
    route, queue = parts["route"], parts.get("route queue")
    request = route.began if queue is None else queue.ended
    first = next(at for name, at, _ in parts["request"].events if name == "first token")
    ways = Ways(
        to_router=1e3 * (route.began - parts["request prepare"].ended),
        to_decode=1e3 * (parts["decode"].began - request),
        back=1e3 * (first - parts["decode first token"].ended),
    )
    assert min(ways.to_router, ways.to_decode, ways.back) > -1e3 * SKEW_S
    assert abs(ways.total - durations_ms["return"]) < 1
    return ways


def _follow(spans: Sequence[CollectedSpan]) -> None:
    """Check that each begins at or after the end of the previous one."""
    for one, following in pairwise(spans):
        assert one.ended <= following.began + 1e-4
