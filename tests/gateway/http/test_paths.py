"""The address of the application: Unix socket files, and the root path of a proxy."""

import socket

import pytest
from fakes.router import FakeRouter, saying
from oracles.http_errors import CHAT, HI, check

from pdserve.gateway.listener import hold_port, unix_listener

pytestmark = pytest.mark.anyio


async def test_the_root_path_is_removed(make_http):
    client = make_http(saying("hello"), root_path="/llm/one/", keys=("k",))
    headers = {"authorization": "Bearer k"}
    for prefix in ("", "/llm/one"):
        assert (await client.get(f"{prefix}/health")).status_code == 200
        assert (await client.get(f"{prefix}/v1/models")).status_code == 401
        body = {"model": "tiny", "messages": HI}
        reply = await client.post(f"{prefix}{CHAT}", json=body, headers=headers)
        assert reply.status_code == 200
    for path in ("/llm/health", "/llm/onehealth", "/llm/one/llm/one/health"):
        check(await client.get(path, headers=headers), 404, code="unknown_url")


@pytest.mark.parametrize("path", ["llm", "/v1", "/tokenize", "/a b", "/a//b", "/a?b"])
async def test_an_invalid_root_path_is_refused(make_app, path):
    with pytest.raises(ValueError, match="--root-path"):
        make_app(FakeRouter(saying("x")), root_path=path)


def test_a_socket_in_use_is_not_replaced(tmp_path):
    path = str(tmp_path / "api")
    with unix_listener(path) as first:
        assert first is not None
        with pytest.raises(OSError, match=f"{path}: another server"), unix_listener(path):
            pass
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
    assert not (tmp_path / "api").exists()


def test_a_held_port_is_not_held_twice():
    """Refuse a second hold even before a server listens on the port."""
    with hold_port("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            hold_port("127.0.0.1", port)
    hold_port("127.0.0.1", port).close()


def test_only_sockets_are_replaced(tmp_path):
    file = tmp_path / "api"
    file.write_text("a letter")
    with pytest.raises(OSError, match="not a socket"), unix_listener(str(file)):
        pass
    assert file.read_text() == "a letter"
    file.unlink()
    (tmp_path / "far").write_text("away")
    file.symlink_to(tmp_path / "far")
    with pytest.raises(OSError, match="not a socket"), unix_listener(str(file)):
        pass
    with (
        pytest.raises(OSError, match="cannot listen on"),
        unix_listener(str(tmp_path / ("x" * 120))),
    ):
        pass
    with unix_listener("") as nothing:
        assert nothing is None


def test_the_socket_of_a_successor_is_not_removed(tmp_path):
    file = tmp_path / "api"
    with unix_listener(str(file)):
        file.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(file))
    assert file.exists()
