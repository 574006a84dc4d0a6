"""The router as a process: it reports, exports metrics, and ends on a signal."""

import asyncio
import signal
import socket
import subprocess
import sys
import urllib.request
from typing import Any

import pytest
from systems.eventually import LIMIT_S

from pdserve.services.common.tenants import ApiKeys
from pdserve.services.router.dispatcher import Dispatcher
from pdserve.services.router.main import run
from pdserve.services.router.settings import RouterSettings

PROGRAM = """
import sys
from pdserve.services.router.main import run
from pdserve.services.router.settings import RouterSettings

def report(event, figures):
    print(event, figures.get("address", ""), flush=True)

secret = ("s" * 32,)
port, bind = int(sys.argv[1]), sys.argv[2]
settings = RouterSettings(cluster_secret=secret, metrics_port=port, bind=bind)
sys.exit(run(settings, report))
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def start(metrics: int, bind: str = "127.0.0.1:0") -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(metrics), bind],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_listens_exports_and_stops() -> None:
    metrics = free_port()
    with start(metrics) as process:
        assert process.stdout is not None
        event, address = process.stdout.readline().split()
        assert event == "listening"
        assert process.stdout.readline().strip() == "ready"
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        assert "pdserve_router_requests 0.0" in text
        assert "pdserve_router_isolated 0.0" in text
        assert "pdserve_build_info{" in text
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5):
            pass
        with start(0, address) as second:
            _, errors = second.communicate(timeout=LIMIT_S)
            assert second.returncode != 0
            assert f"cannot listen on {address}" in errors
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=LIMIT_S) == 0


def test_a_router_without_its_ticker_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: Dispatcher, now: float) -> None:
        raise KeyError("no such request")

    monkeypatch.setattr(Dispatcher, "tick", fail)
    assert run(RouterSettings(cluster_secret=("s" * 32,), log_level="warning")) == 1
    assert "no such request" in capsys.readouterr().err


@pytest.mark.anyio
async def test_metrics_count_what_happened(make_cluster: Any) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    from pdserve.services.router.metrics import RouterMetrics

    cluster = await make_cluster()
    await cluster.decode()
    gateway = await cluster.gateway()
    await gateway.start("r", list(range(20)))
    await gateway.end("r")
    registry = CollectorRegistry()
    registry.register(RouterMetrics(cluster.router.core))
    text = (await asyncio.to_thread(generate_latest, registry)).decode()
    assert 'pdserve_router_ended_total{outcome="ok"} 1.0' in text
    assert 'pdserve_router_prefills_total{where="local"} 1.0' in text
    assert 'pdserve_router_decisions_total{reason="short prompt"} 1.0' in text
    assert 'pdserve_router_workers{model_name="tiny",role="decode",state="live"} 1.0' in text


def test_a_certificate_that_no_client_would_get_is_refused() -> None:
    with pytest.raises(ValueError, match="--client-bind"):
        RouterSettings(tls_cert="cert.pem", tls_key="key.pem")
    RouterSettings(tls_cert="cert.pem", tls_key="key.pem", client_bind="127.0.0.1:0")


def test_a_router_without_its_watch_of_the_keys_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail(self: ApiKeys) -> None:
        raise KeyError("no such file system")

    monkeypatch.setattr(ApiKeys, "watch", fail)
    assert run(RouterSettings(cluster_secret=("s" * 32,), log_level="warning")) == 1
    assert "no such file system" in capsys.readouterr().err
