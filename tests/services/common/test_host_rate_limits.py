"""Requests, tokens and seconds of text per key and minute."""

import asyncio
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pdserve.protos.common_pb2 import OVERLOADED
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rate_limits import (
    OPEN_S,
    STORAGE_S,
    CountsFile,
    RateLimits,
    RateSettings,
)

pytestmark = pytest.mark.anyio


async def test_a_refused_request_is_not_counted(anyio_backend: str) -> None:
    rates = RateLimits(RateSettings(tokens=10_000))
    await rates.count_tokens(b"one", 9000)
    with pytest.raises(ServiceError, match="tokens per minute"):
        await rates.count_tokens(b"one", 2000)
    await rates.count_tokens(b"one", 500)
    assert (await rates.headers(b"one"))["x-ratelimit-remaining-tokens"] == "500"


@pytest.mark.parametrize("file", [False, True])
async def test_a_request_that_loses_a_race_to_another_process_is_not_counted(
    file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> None:
    storage = f"sqlite:///{tmp_path}/rates.db" if file else "memory://"
    rates = RateLimits(RateSettings(tokens=10, storage=storage))
    await rates.count_tokens(b"one", 8)

    async def fits(*_: Any, **__: Any) -> bool:
        return True

    monkeypatch.setattr("limits.aio.strategies.FixedWindowRateLimiter.test", fits)
    with pytest.raises(ServiceError, match="tokens per minute"):
        await rates.count_tokens(b"one", 5)
    assert (await rates.headers(b"one"))["x-ratelimit-remaining-tokens"] == "2"
    await rates.close()


async def test_requests_without_a_limit_are_not_refused(anyio_backend: str) -> None:
    rates = RateLimits(RateSettings(requests=1))
    rates.text_spent(b"one", 3600.0)
    await rates.close()
    await rates.check_text(b"one")
    await rates.count_tokens(b"one", 10**9)


async def test_seconds_of_text_are_limited(anyio_backend: str) -> None:
    rates = RateLimits(RateSettings(text_s=0.5))
    await rates.check_text(b"one")
    rates.text_spent(b"one", 0.2)
    await rates.close()
    await rates.check_text(b"one")
    rates.text_spent(b"one", 0.7)
    await rates.close()
    with pytest.raises(ServiceError, match="seconds of preparing texts") as caught:
        await rates.check_text(b"one")
    assert caught.value.code == OVERLOADED
    await rates.check_text(b"two")


def test_an_unknown_storage_is_refused() -> None:
    with pytest.raises(ValueError, match="--rate-storage nowhere") as caught:
        RateLimits(RateSettings(requests=1, storage="nowhere://:password@x"))
    assert "password" not in str(caught.value)


async def test_processes_that_share_a_file_count_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> None:
    storage = f"sqlite:///{tmp_path}/rates.db"
    one, other = (RateLimits(RateSettings(requests=3, storage=storage)) for _ in range(2))
    for rates in (one, other, one):
        await rates.count_request(b"a")
    for rates in (one, other):
        with pytest.raises(ServiceError, match="requests per minute") as caught:
            await rates.count_request(b"a")
        assert 55 < caught.value.retry_after_s <= 60
        await rates.count_request(b"b")
    assert (await other.headers(b"b"))["x-ratelimit-remaining-requests"] == "1"
    late = time.time() + 61
    monkeypatch.setattr("time.time", lambda: late)
    assert (await other.headers(b"a"))["x-ratelimit-remaining-requests"] == "3"
    await other.count_request(b"a")
    assert (await one.headers(b"a"))["x-ratelimit-remaining-requests"] == "2"
    assert (tmp_path / "rates.db").stat().st_mode & 0o777 == 0o600
    for rates in (one, other):
        await rates.close()


def test_a_file_that_another_process_creates_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "rates.db"
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        made = threading.Timer(0.2, other.execute, ("COMMIT",))
        made.start()
        CountsFile(str(path)).close()
        made.join()


async def test_a_file_locked_by_another_process_limits_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, anyio_backend: str
) -> None:
    path = tmp_path / "rates.db"
    rates = RateLimits(RateSettings(requests=1, storage=f"sqlite:///{path}"))
    with closing(sqlite3.connect(path, isolation_level=None)) as stopped:
        stopped.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        for _ in range(3):
            await rates.count_request(b"one")
        assert time.monotonic() - began < OPEN_S  # the event loop does not wait that long
    assert caplog.text.count("rate limits are not enforced for 5 s: database is locked") == 1
    await rates.close()


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--rate-storage {tmp_path}/none/x: .*No such file"):
        RateLimits(RateSettings(requests=1, storage=f"sqlite:///{tmp_path}/none/x"))
    (tmp_path / "text").write_text("no database" * 100)
    with pytest.raises(ValueError, match="not a database"):
        RateLimits(RateSettings(requests=1, storage=f"sqlite:///{tmp_path}/text"))


async def test_a_storage_that_is_down_limits_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, anyio_backend: str
) -> None:
    rates = RateLimits(RateSettings(requests=1))

    async def fail(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route")

    for name in ("hit", "test", "get_window_stats"):
        monkeypatch.setattr(f"limits.aio.strategies.FixedWindowRateLimiter.{name}", fail)
    for _ in range(3):
        await rates.count_request(b"one")
    assert (await rates.headers(b"one"))["x-ratelimit-remaining-requests"] == "1"
    assert caplog.text.count("rate limits are not enforced for 5 s: no route") == 1


async def test_a_storage_that_hangs_limits_no_request_and_is_not_retried_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, anyio_backend: str
) -> None:
    rates = RateLimits(RateSettings(requests=1, tokens=1))
    num_asked = 0

    async def hang(*_: Any, **__: Any) -> Any:
        nonlocal num_asked
        num_asked += 1
        await asyncio.Event().wait()

    for name in ("hit", "test", "get_window_stats"):
        monkeypatch.setattr(f"limits.aio.strategies.FixedWindowRateLimiter.{name}", hang)
    async with asyncio.timeout(10 * STORAGE_S):
        for _ in range(30):
            await rates.count_request(b"one")
            await rates.count_tokens(b"one", 1)
            assert (await rates.headers(b"one"))["x-ratelimit-remaining-tokens"] == "1"
    assert num_asked == 1
    assert "rate limits are not enforced for 5 s: no response within 0.5 s" in caplog.text
