"""The blocking client of pdserve's HTTP API."""

import os
import signal
from collections.abc import Iterator
from threading import Timer

import pytest
from fakes.api_server import STALL, api_server, says

from pdserve.cli.http_client import ApiClient


@pytest.fixture
def unnoticed_ctrl_c() -> Iterator[None]:
    """Python's handler of SIGINT raises nothing, as if it ran in a destructor."""
    previous = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, previous)


def test_ctrl_c_ends_a_stream_that_waits(unnoticed_ctrl_c: None) -> None:
    with api_server() as server:
        server.events = [*says("and so on"), STALL]
        wakeup = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wakeup)
        events = ApiClient(server.url, timeout_s=20).stream("/v1/chat/completions", {})
        assert next(events)["choices"]
        Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            list(events)
        assert signal.set_wakeup_fd(wakeup) == wakeup
