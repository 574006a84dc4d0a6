"""A tracer whose spans stay in this process."""

from typing import Any

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pdserve.services.common.tracing import ExportingTracer

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class MemoryTracer(ExportingTracer):
    def __init__(self, sample: float = 1.0) -> None:
        self.exporter = InMemorySpanExporter()
        super().__init__("test", self.exporter, sample)

    def ended(self) -> list[Any]:
        """End the tracer; return all spans in the order of their ends."""
        self.close()
        return list(self.exporter.get_finished_spans())

    def spans(self) -> dict[str, Any]:
        """End the tracer; return all spans by name."""
        return {span.name: span for span in self.ended()}


def parent_of(span: Any) -> str:
    return f"{span.parent.span_id:016x}" if span.parent else ""


def own_id(span: Any) -> str:
    return f"{span.context.span_id:016x}"


def trace_of(span: Any) -> str:
    return f"{span.context.trace_id:032x}"
