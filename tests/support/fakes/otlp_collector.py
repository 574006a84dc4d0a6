"""An OpenTelemetry collector for tests: it receives spans over HTTP and keeps them."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from systems.eventually import wait_until


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """A span; times are seconds since the epoch."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    trace_state: str
    began: float
    ended: float
    attributes: dict[str, Any]
    events: list[tuple[str, float, dict[str, Any]]]
    error: str

    @property
    def duration_s(self) -> float:
        return self.ended - self.began


class OtlpCollector:
    """Context manager: `with OtlpCollector() as collector`."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []

    def __enter__(self) -> "OtlpCollector":
        keep = self._keep

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                keep(self.path, body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Refuse new connections; received spans are kept."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def _keep(self, path: str, body: bytes) -> None:
        assert path.partition("?")[0] == "/v1/traces"
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_span(service, span) for span in scope.spans]

    def trace(self, trace_id: str, *names: str) -> list[CollectedSpan]:
        """Return the spans of a trace by start time, once it has all of these names."""

        def found() -> list[CollectedSpan]:
            mine = [span for span in self.spans if span.trace_id == trace_id]
            complete = {span.name for span in mine} >= set(names)
            return sorted(mine, key=lambda span: span.began) if complete else []

        spans: list[CollectedSpan] = wait_until(found, self._names_of(trace_id), 10.0)
        return spans

    def _names_of(self, trace_id: str) -> Callable[[], str]:
        return lambda: str([s.name for s in self.spans if s.trace_id == trace_id])


def _span(service: str, span: Any) -> CollectedSpan:
    return CollectedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        trace_state=span.trace_state,
        began=span.start_time_unix_nano / 1e9,
        ended=span.end_time_unix_nano / 1e9,
        attributes=_values(span.attributes),
        events=[(e.name, e.time_unix_nano / 1e9, _values(e.attributes)) for e in span.events],
        error=span.status.message,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return None if kind is None else getattr(value, kind)
