"""Selects the collector of traces: the flag, or else OpenTelemetry's own environment variables.
Variables that request something unsupported are refused."""

import os
from importlib.util import find_spec
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

FLAG = "--otlp-traces-endpoint"
PATH = "/v1/traces"


class TraceSettings(Protocol):
    """The tracing options, which every process has."""

    @property
    def otlp_traces_endpoint(self) -> str: ...

    @property
    def otlp_traces_sample(self) -> float: ...


def endpoint(settings: TraceSettings) -> str:
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
