"""Records what a process does for a request as spans, and sends them to an OpenTelemetry collector,
whose URL is in a flag or in OpenTelemetry's own environment variables.

This is the only module that uses OpenTelemetry; it imports it only if a collector is configured.
Otherwise it records no spans, and only passes a client's trace context on to other processes. Times
are readings of time.monotonic. A background thread exports spans after they have ended; spans that
the collector does not accept in time are dropped.
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
    """Return the URL to which spans are sent; empty if tracing is off. Raises ValueError if the
    configured URL is not one, if OpenTelemetry's environment variables select anything but OTLP
    over HTTP, or if the flag is set and OpenTelemetry is not installed."""
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
    """Return the first OpenTelemetry environment variable that contains a collector's URL, and the
    URL; both empty if none is set."""
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        if url := os.environ.get(name, ""):
            return name, url
    return "", ""


def switched_off() -> str:
    """Return the environment variable setting that disables tracing, as NAME=value; empty if there
    is none."""
    for name, off in (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")):
        if os.environ.get(name, "").strip().lower() == off:
            return f"{name}={off}"
    return ""


def _check_environment() -> None:
    """Raise ValueError if OpenTelemetry's environment variables select an exporter or a protocol
    other than OTLP over HTTP."""
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
    """Return a URL without its parts that may be secret: user, password and query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def is_installed() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A reference to a span that processes pass to each other: the W3C headers traceparent
    (`parent`) and tracestate (`state`). Both are empty if there is no span."""

    parent: str = ""
    state: str = ""

    @property
    def trace_id(self) -> str:
        """The id of the trace in hex; empty if this context refers to no span."""
        return self.parent[3:35]

    @property
    def span_id(self) -> str:
        """The id of the span in hex; empty if this context refers to no span."""
        return self.parent[36:52]


NOWHERE = TraceContext()


class TraceSpan:
    """A span: what one process does for one request. This base class records nothing. `context` is
    the parent for spans of processes that it calls; `recorded` says whether this span is
    recorded."""

    recorded = False

    def __init__(self, context: TraceContext = NOWHERE) -> None:
        self.context = context

    def set(self, **attributes: Value) -> None:
        """Set attributes of the span; "__" in a name becomes a dot."""

    def event(self, name: str, at: float | None = None, **attributes: Value) -> None:
        """Add an event to the span, at the time `at` or now. A span keeps its first MAX_EVENTS
        events."""

    def phase(self, name: str, began: float, ended: float) -> None:
        """Add a child span with these start and end times; ignored if it took no time."""

    def end(self, error: str = "") -> None:
        """End the span; call once. `error`: why the work failed; empty if it did not."""


NO_SPAN = TraceSpan()


class Tracer:
    """Begins the spans of a process. This base class records none, and only passes a client's trace
    context on. `sample`: the share of the traces marked as sampled by clients that is recorded,
    from 0 to 1. Processes with the same `key` select the same traces."""

    def __init__(self, sample: float = 1.0, key: bytes = b"") -> None:
        self._below = round(sample * 2**64)
        self._key = key or os.urandom(KEY_BYTES)

    def begin(
        self, name: str, parent: TraceContext, began: float, *, entry: bool = False
    ) -> TraceSpan:
        """Begin a span of a request. With `entry`, the request comes from a client, and the span
        may begin a new trace; otherwise nothing is recorded unless there is a parent span."""
        parent_ids = self._parent_ids(parent, entry) if entry else None
        return NO_SPAN if parent_ids is None else TraceSpan(_context(*parent_ids, parent.state))

    def _parent_ids(self, parent: TraceContext, entry: bool) -> tuple[int, int, bool] | None:
        """Return the ids of the trace and of the parent span, and whether the trace is sampled;
        None if there is no parent. At the entry from clients, the trace must also be in this
        tracer's share."""
        parsed = _parsed(parent.parent)
        if parsed is None:
            return None
        trace, span, sampled = parsed
        return trace, span, sampled and (not entry or self._in_share(trace))

    def _in_share(self, trace: int) -> bool:
        """Return whether a trace belongs to the share that is recorded; always the same result for
        a trace. The choice depends on a secret key, since clients choose the ids of traces."""
        digest = blake2b(trace.to_bytes(16), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest) < self._below


NO_TRACER = Tracer()


def context_of(metadata: Any) -> TraceContext:
    """Return the reference to the caller's span that is in the metadata of a gRPC call."""
    entries = dict(metadata or ())
    return TraceContext(str(entries.get("traceparent", "")), str(entries.get("tracestate", "")))


@contextmanager
def tracing(service: str, settings: ServerSettings, key: bytes = b"") -> Iterator[Tracer]:
    """A context with the tracer of this process, which exports spans if a collector is configured.
    `key` is passed to the Tracer. Raises ValueError if the tracing options are wrong."""
    url = endpoint(settings)
    if not url:
        if settings.otlp_traces_endpoint:
            log.warning(
                "%s has no effect, because the environment disables tracing by %s",
                FLAG,
                switched_off(),
            )
        yield Tracer(settings.otlp_traces_sample, key)
        return
    tracer = ExportingTracer(service, exporter(url), settings.otlp_traces_sample, key)
    try:
        yield tracer
    finally:
        tracer.close()


def exporter(url: str) -> "SpanExporter":
    """Make an exporter that sends spans to the collector at `url`. It logs once when the collector
    stops accepting spans, and once when it accepts them again."""
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
                    log.info("the collector %s accepts traces again", collector)
                else:
                    log.warning(
                        "the collector %s does not accept traces; they are dropped until it does",
                        collector,
                    )
            return result

        def shutdown(self) -> None:
            sender.shutdown()  # type: ignore[no-untyped-call]

    return Exporter()


class ExportingTracer(Tracer):
    """A Tracer that records and exports the spans of sampled traces. At the entry from clients,
    this is a share `sample` of the new traces and of those that clients mark as sampled; elsewhere,
    it is all traces whose parent span is sampled."""

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
        """Queue an ended span for the thread that sends spans to the collector."""
        self._processor.on_end(span)

    @property
    def resource(self) -> Any:
        """OpenTelemetry's description of this process (service name and instance), which each span
        carries."""
        return self._resource

    def close(self) -> None:
        """Send the queued spans to the collector, for at most CLOSE_S; if the last export failed,
        drop them."""
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
    """Parse a traceparent header: return the ids of the trace and of the span, and whether the
    trace is sampled; None if it is malformed."""
    match = _PARENT.fullmatch(parent)
    if match is None:
        return None
    version, trace, span, flags, suffix = match.groups()
    if version == "ff" or (version == "00" and suffix) or not int(trace, 16) or not int(span, 16):
        return None
    return int(trace, 16), int(span, 16), bool(int(flags, 16) & 1)
