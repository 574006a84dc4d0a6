"""The log of completed requests: it keeps the latest, and a flood of one key does not evict
others."""

from dataclasses import dataclass
from typing import Any

import pytest

from pdserve.gateway.caller import Caller
from pdserve.gateway.metrics import GatewayMetrics, RequestLog, RequestMetrics, request_metrics
from pdserve.protos.common_pb2 import INVALID_ARGUMENT, UNAVAILABLE
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.tenants import Tenant


@dataclass(frozen=True)
class FakeMeter:
    """A meter with a tenant, a name and ids."""

    tenant: bytes
    name: str

    @property
    def ids(self) -> tuple[str, ...]:
        return (self.name,)

    def state(self) -> "FakeMeter":
        return self


def end(log: RequestLog, tenant: bytes, *names: str) -> None:
    for name in names:
        meter: Any = FakeMeter(tenant, name)
        log.began(meter)
        log.ended(meter)


def names(log: RequestLog, tenant: bytes) -> list[str]:
    kept: Any = log.ended_of(tenant)
    return [one.name for one in kept]


def test_a_flood_of_one_key_keeps_the_requests_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_metrics, "MAX_ENDED", 5)
    log = RequestLog()
    end(log, b"a", "a1", "a2")
    end(log, b"b", *(f"b{n}" for n in range(100)))
    assert names(log, b"a") == ["a2", "a1"]
    assert names(log, b"b") == ["b99", "b98", "b97"]
    assert log.find(b"b", "b96") is None
    assert log.find(b"a", "b99") is None, "a key must not find requests of another"


def test_evicted_keys_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_metrics, "MAX_ENDED", 3)
    log = RequestLog()
    for n in range(10):
        end(log, b"%d" % n, f"r{n}")
    assert [n for n in range(10) if names(log, b"%d" % n)] == [7, 8, 9]


def test_an_open_request_is_found_before_a_completed_one_of_the_same_id() -> None:
    log = RequestLog()
    end(log, b"a", "same")
    later: Any = FakeMeter(b"a", "same")
    log.began(later)
    assert log.find(b"a", "same") is later


def test_the_line_of_a_request_keeps_its_figures(caplog: pytest.LogCaptureFixture) -> None:
    """Cut a long model name and the message of an error, and show no message of a client's."""
    caplog.set_level("INFO")
    request_id, model = f"chatcmpl-{'a' * 32}", "m" * 100
    for key in ("", "alice", "k" * 64):
        caller = Caller(request_id, tenant=Tenant(key, b"", b""), route="POST /v1/chat/completions")
        check_lines(caplog, caller, model)


def check_lines(caplog: pytest.LogCaptureFixture, caller: Caller, model: str) -> None:
    key = caller.tenant.name
    for error, status, end in (
        (None, 200, "finish=stop"),
        (
            ServiceError(UNAVAILABLE, "why " * 100),
            503,
            "finish=UNAVAILABLE (why why why why w",
        ),
        (ServiceError(INVALID_ARGUMENT, "what the client wrote"), 400, "finish=INVALID_ARGUMENT"),
    ):
        caplog.clear()
        meter = RequestMetrics(GatewayMetrics(), caller, lambda: 1.0)
        meter.begin(model, 12345)
        meter.ended("stop")
        meter.close(error)
        (line,) = caplog.messages
        assert line.startswith(f"POST /v1/chat/completions {status} model=mmmm")
        assert f" key={key[:5]}" in line or not key
        assert (" key=" in line) == bool(key)
        assert " prompt=12345 completion=0 total=0.000s finish=" in line
        assert end in line if status == 503 else line.endswith(end), line
        assert len(f"{line}  request={caller.request_id}") <= 200
