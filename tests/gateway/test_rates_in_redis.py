"""Rates shared by several gateways in a Redis server that the test starts."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from systems.eventually import wait_until

from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rate_limits import RateLimits, RateSettings

pytestmark = pytest.mark.anyio
OWNER = b"one key"


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    if not (program := shutil.which("redis-server")):
        pytest.skip("NO REDIS: rates that several gateways share were not tested")
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", tmp_path],
        stdout=subprocess.DEVNULL,
    )

    def answers() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16) == b"+PONG\r\n"
        return False

    try:
        wait_until(answers, "redis-server")
        yield f"redis://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


async def test_two_gateways_count_together(redis_url: str) -> None:
    first, second = (RateLimits(RateSettings(requests=3, storage=redis_url)) for _ in range(2))
    await first.count_request(OWNER)
    await second.count_request(OWNER)
    assert (await first.headers(OWNER))["x-ratelimit-remaining-requests"] == "1"
    await second.count_request(OWNER)
    with pytest.raises(ServiceError, match="requests per minute"):
        await first.count_request(OWNER)
    await first.count_request(b"another key")
    await first.close()
    await second.close()


async def test_refused_tokens_are_returned(redis_url: str) -> None:
    rates = RateLimits(RateSettings(tokens=10, storage=redis_url))
    await rates.count_tokens(OWNER, 6)
    with pytest.raises(ServiceError, match="tokens per minute"):
        await rates.count_tokens(OWNER, 5)
    await rates.count_tokens(OWNER, 4)
    assert (await rates.headers(OWNER))["x-ratelimit-remaining-tokens"] == "0"
    await rates.close()
