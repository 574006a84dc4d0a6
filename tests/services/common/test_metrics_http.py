"""The metrics port: its contents, and that no client can block it."""

import resource
import socket
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter
from systems.eventually import LIMIT_S, wait_until

from pdserve.services.common import metrics
from pdserve.services.common.metrics import MAX_CONNECTIONS, MetricsHttp


@pytest.fixture
def server() -> Iterator[MetricsHttp]:
    registry = CollectorRegistry()
    Counter("things", "Things", registry=registry).inc(3)
    server = MetricsHttp(registry, 0)
    yield server
    server.close()


def url(server: MetricsHttp, path: str = "/metrics") -> str:
    return f"http://127.0.0.1:{server.port}{path}"


def silent(server: MetricsHttp) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), LIMIT_S)


def test_the_port_serves_only_metrics(server: MetricsHttp) -> None:
    answer = httpx.get(url(server))
    assert "things_total 3.0" in answer.text
    assert answer.headers["server"].strip() == "pdserve"
    for path in ("/", "/metrics/", "/metrics/x", "/favicon.ico", "/x?/metrics"):
        assert httpx.get(url(server, path)).status_code == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
        assert httpx.request(method, url(server)).status_code == 501


def test_names_are_the_same_for_every_scraper() -> None:
    """This includes a Prometheus 2, which would prefer OpenMetrics."""
    registry = CollectorRegistry()
    Counter("vllm:things", "Things", registry=registry).inc(3)
    server = MetricsHttp(registry, 0)
    of_two = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    of_three = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,*/*;q=0.1"
    pages = {httpx.get(url(server), headers={"accept": a}).text for a in (of_two, of_three, "*/*")}
    server.close()
    (page,) = pages
    assert "\nvllm:things_total 3.0\n" in page


def test_a_silent_connection_is_closed(
    server: MetricsHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "SILENT_S", 0.1)
    with silent(server) as nothing, silent(server) as half:
        half.sendall(b"GET /metrics HTTP/1.1\r\nHost:")
        assert nothing.recv(1) == half.recv(1) == b""


def test_many_connections_block_no_scraper(
    server: MetricsHttp, capfd: pytest.CaptureFixture[str]
) -> None:
    """They do not fill the log either."""
    crowd = [silent(server) for _ in range(MAX_CONNECTIONS + 4)]
    assert httpx.get(url(server)).status_code == 200
    assert [sock.recv(1) for sock in crowd[:5]] == [b""] * 5
    for sock in crowd:
        sock.close()
    assert httpx.get(url(server)).status_code == 200
    assert capfd.readouterr().err == ""


def test_the_port_is_bound_to_the_given_address_only() -> None:
    server = MetricsHttp(CollectorRegistry(), 0, "[::1]:0")
    with socket.create_connection(("::1", server.port), LIMIT_S):
        pass
    with pytest.raises(ConnectionRefusedError):
        silent(server)
    with pytest.raises(OSError, match="in use"):
        MetricsHttp(CollectorRegistry(), server.port, "[::1]:0")
    server.close()


def test_without_descriptors_the_server_waits_and_logs_once(
    server: MetricsHttp, caplog: pytest.LogCaptureFixture
) -> None:
    client = socket.socket()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno(), hard))
        client.connect(("127.0.0.1", server.port))
        wait_until(lambda: "cannot accept" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert client.recv(8) == b"HTTP/1.0"
    client.close()
    assert len(caplog.messages) == 1
