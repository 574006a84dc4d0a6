"""Metrics that every process exports about itself: certificates, event loop lag, build."""

import asyncio
import time
from importlib import metadata
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from systems.eventually import eventually

from pdserve.services.common import metrics
from pdserve.services.common.auth.certificates import Role, issue, make_authority
from pdserve.services.common.metrics import (
    MetricsPort,
    ProcessFacts,
    lag_histogram,
    watch_loop,
)
from pdserve.services.common.options import BackendSettings

DAY_S = 86400.0


def left(facts: ProcessFacts) -> dict[str, float]:
    """Return the days until the certificates expire."""
    families = {family.name: family for family in facts.collect()}
    samples = families["pdserve_certificate_expiry_seconds"].samples
    return {s.labels["certificate"]: s.value / DAY_S for s in samples}


def test_the_time_left_of_certificates_follows_their_files(tmp_path: Path) -> None:
    old, new = make_authority(days=3), make_authority(days=30)
    ca, own = tmp_path / "ca.pem", tmp_path / "own.pem"
    ca.write_bytes(old.certificate)
    own.write_bytes(issue(old, Role.ROUTER, days=2).certificate + old.certificate)
    text = issue(old, Role.ROUTER, days=1).certificate.decode()
    files = {"cluster_ca": str(ca), "cluster": str(own), "client": text}
    assert left(ProcessFacts(files)) == pytest.approx(
        {"cluster_ca": 3, "cluster": 2, "client": 1}, abs=0.01
    )
    ca.write_bytes(old.certificate + new.certificate)  # while they are changed
    own.unlink()
    assert left(ProcessFacts(files)) == pytest.approx({"cluster_ca": 30, "client": 1}, abs=0.01)
    later = ProcessFacts(files, lambda: time.time() + 2 * DAY_S)
    assert left(later)["client"] == pytest.approx(-1, abs=0.01)
    ca.write_text("no certificate")
    assert set(left(ProcessFacts(files))) == {"client"}


@pytest.mark.anyio
async def test_a_rare_long_delay_counts_with_its_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocked once in more than 100 measurements, the loop is late for that share of the time."""
    monkeypatch.setattr(metrics, "LOOK_S", 0.005)
    seen: list[float] = []
    watching = asyncio.create_task(watch_loop(seen.append))
    await eventually(lambda: len(seen) > 120)
    time.sleep(0.5)  # noqa: ASYNC251  (that is the point)
    await eventually(lambda: max(seen) > 0.4)
    watching.cancel()
    assert sum(late > 0.4 for late in seen) >= 80


@pytest.mark.anyio
async def test_a_port_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics.resources, "files", lambda package: tmp_path)
    (tmp_path / metrics.COMMIT_FILE).write_text("abc123\n")
    own = make_authority().certificate.decode()
    settings = BackendSettings(cluster_cert=own, metrics_port=0)
    port = MetricsPort(settings, "127.0.0.1:0", "")
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://127.0.0.1:{port.number}/metrics")).text
    await port.close()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    (build,) = families["pdserve_build_info"].samples
    assert build.labels == {"version": metadata.version("pdserve"), "commit": "abc123"}
    assert families["process_resident_memory_bytes"].samples[0].value > 1 << 20
    assert families["pdserve_event_loop_lag_seconds"].type == "histogram"
    assert families["pdserve_certificate_expiry_seconds"].samples[0].value > DAY_S


def test_there_is_no_commit_outside_of_an_image() -> None:
    assert metrics.commit() == ""
    assert lag_histogram(CollectorRegistry())
