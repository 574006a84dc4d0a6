"""The collector that takes the traces, and OpenTelemetry's own settings for it."""

from dataclasses import replace

import pytest

from pdserve.services.common import tracing as module
from pdserve.services.common.options import ServerSettings
from pdserve.services.common.tracing import endpoint, redacted_url

BASE, TRACES = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"


def of(url: str = "") -> str:
    return endpoint(replace(ServerSettings(), otlp_traces_endpoint=url))


def test_the_endpoint_of_each_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of("http://c:4318") == of("http://c:4318/") == "http://c:4318/v1/traces"
    assert of("https://c/own/path?a=b") == "https://c/own/path?a=b"
    assert of("https://c?a=b") == "https://c/v1/traces?a=b"
    assert of() == ""
    monkeypatch.setenv(BASE, "http://base:4318/under/")
    assert of() == "http://base:4318/under/v1/traces"
    assert of("http://c:4318") == "http://c:4318/v1/traces"
    monkeypatch.setenv(TRACES, "http://traces")
    assert of() == "http://traces"
    monkeypatch.setattr(module, "is_installed", lambda: False)
    assert of() == ""  # the environment is not only pdserve's
    with pytest.raises(ValueError, match=r"pip install 'pdserve\[trace\]'"):
        of("http://c:4318")


@pytest.mark.parametrize(
    "wrong",
    ["localhost:4318", "grpc://c:4317", "http://", "http://c:x", "http://[", "http://u:secret@["],
)
def test_an_invalid_url_is_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"--otlp-traces-endpoint: .* is not an http") as refused:
        of(wrong)
    assert "secret" not in str(refused.value)
    monkeypatch.setenv(BASE, wrong)
    with pytest.raises(ValueError, match=f"{BASE}: .* is not an http"):
        of()


def test_a_password_is_refused_in_the_flag() -> None:
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        of("http://user:secret@c")
    assert "secret" not in str(refused.value)


def test_a_url_is_redacted() -> None:
    assert redacted_url("https://user:secret@c:1/x?token=secret#secret") == "https://c:1/x"


@pytest.mark.parametrize("url", ["http://c:4318", ""])
def test_another_protocol_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROTOCOL, "grpc")
    assert of() == ""  # without an endpoint the protocol is not checked
    monkeypatch.setenv(BASE, "http://base:4317")
    with pytest.raises(ValueError, match=f"{PROTOCOL}=grpc: .*_TRACES_PROTOCOL=http/protobuf"):
        of(url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    assert of(url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/json"):
        of(url)


@pytest.mark.parametrize("url", ["http://c:4318", ""])
def test_settings_that_disable_tracing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BASE, "http://base:4318")
    for exporter, on in (("otlp", True), ("otlp_proto_http,console", True), ("none", False)):
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", exporter)
        assert bool(of(url)) is on
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    with pytest.raises(ValueError, match="OTEL_TRACES_EXPORTER=console"):
        of(url)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "True")
    assert of(url) == ""
