"""The MCP configuration file: valid entries, and errors in clear words."""

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from pdserve.gateway.mcp import config, read_config
from pdserve.gateway.mcp.config import servers_of

SECRET = "s3cret-value"


def of(**servers: Any) -> bytes:
    return json.dumps({"mcpServers": servers}).encode()


def test_servers_are_read_in_order() -> None:
    files, web = servers_of(
        of(
            files={
                "command": "npx", "args": ["-y", "server"], "env": {"KEY": SECRET},
                "autoApprove": ["read"], "timeout": 5,
            },
            web={"type": "http", "url": "https://a.example/mcp", "headers": {"X-Key": SECRET},
                 "autoApprove": ["*"]},
            off={"command": "x", "disabled": True},
        )
    )  # fmt: skip
    assert (files.name, files.command, files.env) == (
        "files",
        ("npx", "-y", "server"),
        {"KEY": SECRET},
    )
    assert files.call_s == 5
    assert files.approves("read")
    assert not files.approves("write")
    assert (web.name, web.url, web.headers) == ("web", "https://a.example/mcp", {"X-Key": SECRET})
    assert web.approves("anything")
    assert not servers_of(of(a={"command": "x"}))[0].approves("anything")


def test_secrets_are_not_in_the_repr() -> None:
    (server,) = servers_of(of(a={"command": "x", "args": [SECRET], "env": {"K": SECRET}}))
    (web,) = servers_of(of(a={"url": f"http://u:{SECRET}@a/", "headers": {"K": SECRET}}))
    assert SECRET not in repr(server) + repr(web)


WRONG = [
    (b"{", "not valid JSON"),
    (b"[" * 100_000, "not valid JSON"),
    (b"[]", "the file: "),
    (b"{}", "mcpServers is missing"),
    (b'{"mcpServers": {}, "inputs": []}', "unknown key inputs"),
    (of(a={"command": "x", "autoaprove": [SECRET]}), "unknown key mcpServers.a.autoaprove"),
    (of(a={}), "mcpServers.a needs either a command or a url"),
    (of(a={"command": "x", "url": "http://a"}), "either a command or a url"),
    (of(a={"command": "x", "headers": {"a": SECRET}}), "mcpServers.a.headers is only for"),
    (of(a={"url": "http://a", "env": {"A": SECRET}}), "mcpServers.a.env is only for"),
    (of(a={"url": f"ftp://{SECRET}"}), "mcpServers.a.url must be http"),
    (of(a={"url": f"http://[{SECRET}"}), "mcpServers.a.url must be http"),
    (of(a={"command": "x", "type": "sse"}), "mcpServers.a.type: "),
    (of(a={"command": "x", "type": "http"}), "mcpServers.a.type contradicts its command"),
    (of(a={"command": "x", "args": SECRET}), "mcpServers.a.args: "),
    (of(a={"command": "x", "env": {"A": 1}}), "mcpServers.a.env.A: "),
    (of(a={"command": "x", "env": {"A=B": SECRET}}), "mcpServers.a.env.'A=B' is not a valid"),
    (of(a={"url": "http://a", "headers": {"A": f"{SECRET}\n"}}), "headers.'A' is not a valid"),
    (of(a={"command": "x\0"}), "must not contain a NUL"),
    (of(a={"command": "x", "timeout": 0}), "mcpServers.a.timeout: "),
    (of(**{f"s{i}": {"command": "x"} for i in range(65)}), "at most 64"),
    (of(a={"command": "x" * (1 << 20)}), "more than 1048576 bytes"),
]  # fmt: skip


def test_an_invalid_entry_is_named(subtests: pytest.Subtests) -> None:
    for content, error in WRONG:
        with subtests.test(error):
            with pytest.raises(ValueError, match=r".") as caught:
                servers_of(content)
            assert error in str(caught.value)
            assert SECRET not in str(caught.value)


def test_a_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    with pytest.raises(ValueError, match=r"--mcp-config .*mcp\.json: No such file"):
        read_config(str(path))
    path.write_bytes(of(a={"command": "x"}))
    path.chmod(0o644)
    assert [server.name for server in read_config(str(path))] == ["a"]
    path.chmod(0o664)
    with pytest.raises(
        ValueError, match=r"--mcp-config .*mcp\.json: other users may write this file"
    ):
        read_config(str(path))
    with pytest.raises(ValueError, match="not a regular file"):
        read_config("/dev/null")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "mcp":
            raise PackageNotFoundError
        return "1"

    monkeypatch.setattr(config, "version", version)
    with pytest.raises(ValueError, match=r"pip install 'pdserve\[mcp\]'"):
        read_config(str(tmp_path / "mcp.json"))
    monkeypatch.setattr(config, "version", lambda name: "1.30.0")
    with pytest.raises(ValueError, match="2 or newer"):
        read_config(str(tmp_path / "mcp.json"))
