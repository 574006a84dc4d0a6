"""Agents of a terminal: each looks at its folder, writes a long file, and recalls both."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from clients.installed import installed
from clients.loopback import Loopback
from clients.pins import CLAUDE_CODE, CODEX, OPENCODE
from fakes.agent_model import LONG_TEXT, NAME, THOUGHT

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]

SEEN = "harbour-lights.txt"


@pytest.fixture
def loopback(tmp_path: Path) -> Iterator[Loopback]:
    with Loopback(tmp_path) as loopback:
        (loopback.work / SEEN).touch()
        yield loopback


def test_claude_code(loopback: Loopback) -> None:
    claude = installed(CLAUDE_CODE) / "claude"
    long_file = loopback.work / "long.txt"
    env = {
        "ANTHROPIC_BASE_URL": loopback.url,
        "ANTHROPIC_AUTH_TOKEN": "a-key",
        "ANTHROPIC_MODEL": NAME,
        "ANTHROPIC_SMALL_FAST_MODEL": NAME,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "CLAUDE_ENABLE_STREAM_WATCHDOG": "1",
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "3000",
    }
    allowed = ("--allowedTools", "Bash,Read,Write", "--permission-mode", "acceptEdits")

    def turn(text: str, *flags: str) -> str:
        form = ("--output-format", "stream-json", "--verbose")
        return loopback.run(claude, "-p", *flags, *form, *allowed, stdin=text, **env)

    first = turn(f"[[list {loopback.work}]]")
    assert SEEN in first
    assert THOUGHT in first
    turn(f"[[write {long_file}]]", "--continue")
    assert long_file.read_text() == LONG_TEXT
    assert "turn 3 with 2 results" in turn("[[recall]]", "--continue")
