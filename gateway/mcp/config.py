"""Reads and checks the configuration file of MCP servers (--mcp-config), which has the same format
as that of other MCP clients.

Invariant: no error and no repr contains a value of the file, since commands, addresses, environment
variables and headers may be secrets.
"""

import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

MAX_FILE_BYTES = 1 << 20
MAX_SERVERS = 64
ALL = "*"  # in autoApprove: every tool of the server
CALL_S = 60.0
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e]*")

Name = Annotated[str, Field(min_length=1, max_length=128)]


class ToolServerError(Exception):
    """An error that an MCP server reports, with the server's own text."""


@dataclass(frozen=True, slots=True)
class McpServer:
    """The configuration of one MCP server: either a program to start or an HTTP address.

    command: the program and its arguments; empty for a server with a url.
    auto_approve: names of the tools that the gateway may call itself; "*" for all.
    call_s: time limit of a tool call in seconds.
    """

    name: str
    command: Sequence[str] = field(default=(), repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    url: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    auto_approve: frozenset[str] = frozenset()
    call_s: float = CALL_S

    def approves(self, tool: str) -> bool:
        """Return whether the gateway may call the tool itself instead of passing the call to the
        client."""
        return tool in self.auto_approve or ALL in self.auto_approve


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    type: Literal["stdio", "http", "streamable-http", "streamableHttp"] | None = None
    command: str = ""
    args: list[str] = Field(default_factory=list)
    env: dict[Name, str] = Field(default_factory=dict)
    url: str = ""
    headers: dict[Name, str] = Field(default_factory=dict)
    autoApprove: list[str] = Field(default_factory=list)
    disabled: bool = False
    timeout: float = Field(CALL_S, gt=0, le=3600)


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    mcpServers: dict[Name, _Entry] = Field(max_length=MAX_SERVERS)


def read_config(path: str) -> list[McpServer]:
    """Read the configuration file and return its servers that are not disabled, in the file's
    order. Raises ValueError with the reason and the place if the file cannot be read, is invalid or
    is writable by other users, or if the package mcp, 2 or newer, is not installed."""
    try:
        _check_package()
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("not a regular file")
            if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ValueError(
                    "other users may write this file, which names commands to run; use chmod go-w"
                )
            content = file.read(MAX_FILE_BYTES + 1)
        return servers_of(content)
    except OSError as error:
        raise ValueError(f"--mcp-config {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--mcp-config {path}: {error}") from None


def _check_package() -> None:
    try:
        installed = version("mcp")
    except PackageNotFoundError:
        installed = ""
    if not installed or int(installed.partition(".")[0]) < 2:
        raise ValueError("MCP servers need the package mcp, 2 or newer: pip install 'pdserve[mcp]'")


def servers_of(content: bytes) -> list[McpServer]:
    """Parse the content of a configuration file and return its servers that are not disabled.
    Raises ValueError with the reason and the place."""
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"the file has more than {MAX_FILE_BYTES} bytes")
    try:
        value = from_json(content, allow_inf_nan=False)  # bounds the depth
    except ValueError:
        raise ValueError("the file is not valid JSON") from None
    try:
        parsed = _File.model_validate(value)
    except ValidationError as error:
        raise ValueError(_first_error(error)) from None
    servers = [_server(name, entry) for name, entry in parsed.mcpServers.items()]
    return [s for s in servers if not parsed.mcpServers[s.name].disabled]


def _server(name: str, entry: _Entry) -> McpServer:
    path = f"mcpServers.{name}"
    if bool(entry.command) == bool(entry.url):
        raise ValueError(f"{path} needs either a command or a url")
    if entry.url:
        _refuse(path, entry, ("args", "env"), "is only for a server with a command")
        _check_url(path, entry.url)
    else:
        _refuse(path, entry, ("headers",), "is only for a server with a url")
    if entry.type is not None and (entry.type == "stdio") != bool(entry.command):
        raise ValueError(f"{path}.type contradicts its {'command' if entry.command else 'url'}")
    if any("\0" in text for text in (entry.command, *entry.args)):
        raise ValueError(f"{path}: a command must not contain a NUL character")
    for key, value in entry.env.items():
        if "=" in key or "\0" in key + value:
            raise ValueError(f"{path}.env.{key!r} is not a valid environment variable")
    for key, value in entry.headers.items():
        if not (_HEADER_NAME.fullmatch(key) and _HEADER_VALUE.fullmatch(value)):
            raise ValueError(f"{path}.headers.{key!r} is not a valid HTTP header")
    return McpServer(
        name,
        (entry.command, *entry.args) if entry.command else (),
        entry.env,
        entry.url,
        entry.headers,
        frozenset(entry.autoApprove),
        entry.timeout,
    )


def _refuse(path: str, entry: _Entry, names: Sequence[str], reason: str) -> None:
    for name in names:
        if getattr(entry, name):
            raise ValueError(f"{path}.{name} {reason}")


def _check_url(path: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"{path}.url must be http://... or https://...")


def _first_error(error: ValidationError) -> str:
    """Return the text of the first validation error, without the invalid value, which may be a
    secret."""
    first: Any = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown key {path}"
    if first["type"] == "missing":
        return f"{path} is missing"
    return f"{path or 'the file'}: {first['msg'][:1].lower()}{first['msg'][1:]}"
