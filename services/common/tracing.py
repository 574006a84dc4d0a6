"""Records a request's work in a process as spans for an OpenTelemetry collector, which a flag or
OpenTelemetry's own variables name.

The only module that uses OpenTelemetry, which it imports only if there is an endpoint. Without one
it records no span and passes a client's context on. Times are readings of time.monotonic. A
background thread exports a span after it has ended; spans that the collector does not take in time
are dropped.
"""

import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from pdserve.services.common.options import ServerSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

FLAG = "--otlp-traces-endpoint"
PATH = "/v1/traces"
log = logging.getLogger(__name__)
MAX_EVENTS = 32  # recorded in one span
MAX_QUEUED = 2048  # spans queued for the collector
EXPORT_S = 2.0  # for a collector to take a batch
KEY_BYTES = 16  # length of the sampling key
CLOSE_S = 1.0  # for the last batches at the end of the process
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_STATE = re.compile(r"[\x20-\x7e]{1,512}")
Value = str | bool | int | float | Sequence[str]


def endpoint(settings: ServerSettings) -> str:
    """The URL that takes spans; empty: no tracing. Raises ValueError if the URL is not one, if
    OpenTelemetry's variables request more than OTLP over HTTP, or if the flag is set and
    OpenTelemetry is not installed."""
    name, url = FLAG, settings.otlp_traces_endpoint
    if not url:
        name, url = _of_environment()
        if not is_installed():
            return ""  # other programs share the environment
    if not url or switched_off():
        return ""
    if not _is_http(url):
        url_text = "its value" if "@" in url or "?" in url else repr(url)
        raise ValueError(f"{name}: {url_text} is not an http or https URL")
    parts = urlsplit(url)
    if name == FLAG and parts.username is not None:
        raise ValueError(f"{FLAG}: put passwords into OTEL_EXPORTER_OTLP_HEADERS, not into the URL")
    if not is_installed():
        raise ValueError(f"{FLAG} needs OpenTelemetry: pip install 'pdserve[trace]'")
    _check_environment()
    if name == "OTEL_EXPORTER_OTLP_ENDPOINT" or (name == FLAG and parts.path in ("", "/")):
        return urlunsplit(parts._replace(path=parts.path.rstrip("/") + PATH))
    return url


def _of_environment() -> tuple[str, str]:
    """The URL in OpenTelemetry's variables, and the variable's name; empty if none is set."""
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        if url := os.environ.get(name, ""):
            return name, url
    return "", ""


def switched_off() -> str:
    """The variable that disables tracing, as NAME=value; empty if none does."""
    for name, off in (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")):
        if os.environ.get(name, "").strip().lower() == off:
            return f"{name}={off}"
    return ""


def _check_environment() -> None:
    """Raises ValueError if the environment selects an exporter or protocol other than OTLP by
    HTTP."""
    exporters = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if "otlp" not in (item.strip().removesuffix("_proto_http") for item in exporters.split(",")):
        raise ValueError(f"OTEL_TRACES_EXPORTER={exporters}: pdserve supports only otlp and none")
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := os.environ.get(name, "").strip():
            if protocol != "http/protobuf":
                setting = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf and an endpoint for it"
                raise ValueError(
                    f"{name}={protocol}: traces are sent over HTTP only; set {setting}"
                )
            return


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bad port or unbalanced brackets
        return False


def redacted_url(url: str) -> str:
    """A URL without its possibly secret parts: user, password and query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def is_installed() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span's reference as passed between processes: W3C traceparent and tracestate. Empty: no
    span."""

    parent: str = ""
    state: str = ""

    @property
    def trace_id(self) -> str:
        """The trace's id in hex; empty if there is no span."""
        return self.parent[3:35]

    @property
    def span_id(self) -> str:
        """The span's id in hex; empty if there is no span."""
        return self.parent[36:52]


NOWHERE = TraceContext()


class TraceSpan:
    """A process's work for one request. This base class records nothing; `context` is the parent
    for downstream calls, and `recorded` says whether the span is kept."""

    recorded = False

    def __init__(self, context: TraceContext = NOWHERE) -> None:
        self.context = context

    def set(self, **attributes: Value) -> None:
        """Add attributes; "__" in a name becomes a dot."""

    def event(self, name: str, at: float | None = None, **attributes: Value) -> None:
        """Record an event, now or at a time; events beyond MAX_EVENTS are dropped."""

    def phase(self, name: str, began: float, ended: float) -> None:
        """Add a child span that has ended; dropped if its length is 0."""

    def end(self, error: str = "") -> None:
        """End the span; call once. `error`: why it failed."""


NO_SPAN = TraceSpan()


class Tracer:
    """Begins spans. This base class records none, but passes a client's trace context on to
    processes that record. `sample`: the largest share of clients' traces to record; processes with
    the same `key` choose the same traces."""

    def __init__(self, sample: float = 1.0, key: bytes = b"") -> None:
        self._below = round(sample * 2**64)
        self._key = key or os.urandom(KEY_BYTES)

    def begin(
        self, name: str, parent: TraceContext, began: float, *, entry: bool = False
    ) -> TraceSpan:
        """Begin a span of a request. At the entry from clients (`entry`) a new trace may begin;
        elsewhere a span needs a parent."""
        parent_ids = self._parent_ids(parent, entry) if entry else None
        return NO_SPAN if parent_ids is None else TraceSpan(_context(*parent_ids, parent.state))

    def _parent_ids(self, parent: TraceContext, entry: bool) -> tuple[int, int, bool] | None:
        """Return the ids of the trace and of the parent span, and whether the trace is sampled;
        None without a parent. At an entry, only a share of the traces that clients mark as sampled
        is sampled."""
        parsed = _parsed(parent.parent)
        if parsed is None:
            return None
        trace, span, sampled = parsed
        return trace, span, sampled and (not entry or self._in_share(trace))

    def _in_share(self, trace: int) -> bool:
        """Return whether a trace is in the sampled share; the same for every call. Keyed, since
        clients choose trace ids."""
        digest = blake2b(trace.to_bytes(16), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest) < self._below


NO_TRACER = Tracer()


def context_of(metadata: Any) -> TraceContext:
    """Return the parent span in the metadata of a gRPC call."""
    entries = dict(metadata or ())
    return TraceContext(str(entries.get("traceparent", "")), str(entries.get("tracestate", "")))


@contextmanager
def tracing(service: str, settings: ServerSettings, key: bytes = b"") -> Iterator[Tracer]:
    """A context with the tracer of this process; `key` is the Tracer's. Raises ValueError if the
    options cannot work."""
    url = endpoint(settings)
    if not url:
        if settings.otlp_traces_endpoint:
            log.warning("%s has no effect: %s is set", FLAG, switched_off())
        yield Tracer(settings.otlp_traces_sample, key)
        return
    tracer = ExportingTracer(service, exporter(url), settings.otlp_traces_sample, key)
    try:
        yield tracer
    finally:
        tracer.close()


def exporter(url: str) -> "SpanExporter":
    """An exporter that sends spans to a collector. It logs one line when the collector stops taking
    them."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    # They would log every lost batch, and every span that a full queue drops.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)
    logging.getLogger("urllib3").setLevel(logging.INFO)  # its debug lines show the URL's query
    sender = OTLPSpanExporter(url, timeout=EXPORT_S)
    collector = redacted_url(url)

    class Exporter(SpanExporter):
        accepted = True  # whether the last export succeeded

        def export(self, spans: "Sequence[ReadableSpan]") -> "SpanExportResult":
            result = sender.export(spans)
            accepted = result is SpanExportResult.SUCCESS
            if accepted != self.accepted:
                self.accepted = accepted
                if accepted:
                    log.info("%s accepts traces again", collector)
                else:
                    log.warning(
                        "%s does not accept traces; they are dropped until it does", collector
                    )
            return result

        def shutdown(self) -> None:
            sender.shutdown()  # type: ignore[no-untyped-call]

    return Exporter()


class ExportingTracer(Tracer):
    """Records the spans of sampled traces: a share `sample` of those that begin here or that a
    client samples; between processes, those whose parent is sampled."""

    def __init__(
        self, service: str, exporter: "SpanExporter", sample: float = 1.0, key: bytes = b""
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        super().__init__(sample, key)
        self._exporter = exporter
        self._processor = BatchSpanProcessor(
            exporter, max_queue_size=MAX_QUEUED, schedule_delay_millis=500
        )
        self._resource = Resource.create(
            {
                "service.name": f"pdserve-{service}",
                "service.namespace": "pdserve",
                "service.instance.id": str(uuid.uuid4()),
            }
        )

    def begin(
        self, name: str, parent: TraceContext, began: float, *, entry: bool = False
    ) -> TraceSpan:
        parent_ids = self._parent_ids(parent, entry)
        if parent_ids is None:
            if not entry:
                return NO_SPAN
            trace = int.from_bytes(os.urandom(16)) or 1
            parent_ids = trace, 0, self._in_share(trace)
            parent = NOWHERE
        trace, parent_id, sampled = parent_ids
        if not sampled and not entry:
            return NO_SPAN
        span_id = _span_id()
        context = _context(trace, span_id, sampled, parent.state)
        if not sampled:
            return TraceSpan(context)
        return _RecordedSpan(self, context, name, (trace, span_id, parent_id), began, entry)

    def export(self, span: "ReadableSpan") -> None:
        """Queue a span for export."""
        self._processor.on_end(span)

    @property
    def resource(self) -> Any:
        """The OpenTelemetry resource that describes this process."""
        return self._resource

    def close(self) -> None:
        """Send the queued spans, for at most CLOSE_S; drop them if the last export failed."""
        is_unreachable = not getattr(self._exporter, "accepted", True)
        ending = threading.Thread(target=self._processor.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(0.0 if is_unreachable else CLOSE_S)
        if ending.is_alive():
            self._exporter.shutdown()


class _RecordedSpan(TraceSpan):
    recorded = True

    def __init__(
        self,
        tracer: ExportingTracer,
        context: TraceContext,
        name: str,
        ids: tuple[int, int, int],
        began: float,
        entry: bool,
    ) -> None:
        super().__init__(context)
        self._tracer = tracer
        self._name = name
        self._ids = ids  # of the trace, the span, and its parent or 0
        self._began = began
        self._entry = entry
        self._attributes: dict[str, Value] = {}
        self._events: list[tuple[str, float, dict[str, Value]]] = []
        self._phases: list[tuple[str, float, float]] = []

    def set(self, **attributes: Value) -> None:
        self._attributes.update(_dotted(attributes))

    def event(self, name: str, at: float | None = None, **attributes: Value) -> None:
        if len(self._events) < MAX_EVENTS:
            at = time.monotonic() if at is None else at
            self._events.append((name, at, _dotted(attributes)))

    def phase(self, name: str, began: float, ended: float) -> None:
        if ended > began:
            self._phases.append((name, began, ended))

    def end(self, error: str = "") -> None:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
        from opentelemetry.trace.span import TraceState

        offset = time.time_ns() - int(time.monotonic() * 1e9)
        state = TraceState.from_header([self.context.state] if self.context.state else [])

        def ns(seconds: float) -> int:
            return offset + int(seconds * 1e9)

        def span_context(span: int, *, remote: bool) -> SpanContext:
            return SpanContext(trace, span, remote, TraceFlags(TraceFlags.SAMPLED), state)

        trace, span_id, parent = self._ids
        context = span_context(span_id, remote=False)
        for name, began, ended in self._phases:
            phase = ReadableSpan(
                f"{self._name} {name}",
                context=span_context(_span_id(), remote=False),
                parent=context,
                resource=self._tracer.resource,
                start_time=ns(began),
                end_time=ns(ended),
            )
            self._tracer.export(phase)
        span = ReadableSpan(
            self._name,
            context=context,
            parent=span_context(parent, remote=True) if parent else None,
            resource=self._tracer.resource,
            attributes=self._attributes,
            events=[Event(name, values, ns(at)) for name, at, values in self._events],
            kind=SpanKind.SERVER if self._entry else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, error) if error else Status(),
            start_time=ns(self._began),
            end_time=ns(time.monotonic()),
        )
        self._tracer.export(span)


def _context(trace: int, span: int, sampled: bool, state: str) -> TraceContext:
    state = state if _STATE.fullmatch(state) else ""
    return TraceContext(f"00-{trace:032x}-{span:016x}-{int(sampled):02x}", state)


def _span_id() -> int:
    return int.from_bytes(os.urandom(8)) or 1


def _dotted(attributes: dict[str, Value]) -> dict[str, Value]:
    return {name.replace("__", "."): value for name, value in attributes.items()}


def _parsed(parent: str) -> tuple[int, int, bool] | None:
    """Return the ids of the trace and span in a traceparent, and whether the trace is sampled; None
    if it is malformed."""
    match = _PARENT.fullmatch(parent)
    if match is None:
        return None
    version, trace, span, flags, suffix = match.groups()
    if version == "ff" or (version == "00" and suffix) or not int(trace, 16) or not int(span, 16):
        return None
    return int(trace, 16), int(span, 16), bool(int(flags, 16) & 1)
