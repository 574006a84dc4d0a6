"""A listener survives errors that end a single accept."""

import errno
import resource
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from systems.eventually import wait_until

from pdserve.engine.transport import Listener


@pytest.fixture
def port() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def test_a_listener_accepts_again_when_a_descriptor_is_free(
    port: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    accepted: list[socket.socket] = []
    address = f"127.0.0.1:{port.getsockname()[1]}"
    listener = Listener(port, address, accepted.append)
    client = socket.socket()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno(), hard))
        client.connect(port.getsockname())
        wait_until(lambda: "cannot accept" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wait_until(lambda: accepted)
    listener.close()
    assert caplog.messages == [f"cannot accept a connection on {address}: Too many open files"]
    for sock in (client, *accepted):
        sock.close()


@pytest.mark.parametrize("error", [OSError("gone already"), RuntimeError("no thread for it")])
def test_a_connection_that_cannot_start_is_closed(
    port: socket.socket, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    accepted: list[socket.socket] = []

    def begin(sock: socket.socket) -> None:
        accepted.append(sock)
        if len(accepted) < 3:
            raise error

    listener = Listener(port, "here", begin)
    clients = [socket.create_connection(port.getsockname()) for _ in range(3)]
    wait_until(lambda: len(accepted) == 3)
    assert [sock.fileno() for sock in accepted[:2]] == [-1, -1]
    assert accepted[2].fileno() > 0
    listener.close()
    assert caplog.messages == [f"cannot accept a connection on here: {error}"]
    for sock in (*clients, accepted[2]):
        sock.close()


class Aborting(socket.socket):
    """A socket whose first clients disconnect before they are accepted."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(fileno=sock.detach())
        self.num_gone = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if self.num_gone < 3:
            self.num_gone += 1
            raise ConnectionAbortedError(errno.ECONNABORTED, "Software caused connection abort")
        return super().accept()


def test_a_client_that_disconnected_early_does_not_end_the_listener(
    port: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    aborting, accepted = Aborting(port), list[socket.socket]()
    listener = Listener(aborting, "here", accepted.append)
    with socket.create_connection(aborting.getsockname()):
        wait_until(lambda: accepted)
    listener.close()
    assert aborting.num_gone == 3
    assert caplog.messages == []
    accepted[0].close()
