"""Terminal agents, set up as in docs/agents.md: each looks at its folder, writes a long file and
recalls both.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from clients.installed import installed
from clients.loopback import IDLE_MS, Loopback
from clients.pins import CLAUDE_CODE, CODEX, OPENCODE
from fakes.agent_model import LONG_TEXT, NAME, THOUGHT

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]

SEEN = "harbour-lights.txt"
CONTEXT_LEN = 131072

# The user's message, whether it continues the session, and the exit codes that are not failures.
Turn = Callable[..., str]
Agent = Callable[[Loopback], Turn]


def claude_code(loopback: Loopback) -> Turn:
    program = installed(CLAUDE_CODE) / "claude"
    env = {
        "ANTHROPIC_BASE_URL": loopback.url,
        "ANTHROPIC_AUTH_TOKEN": "a-key",
        "ANTHROPIC_MODEL": NAME,
        "ANTHROPIC_SMALL_FAST_MODEL": NAME,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_ENABLE_STREAM_WATCHDOG": "1",
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": IDLE_MS,
        "CLAUDE_CODE_MAX_RETRIES": "0",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
    }
    flags = (
        *("--output-format", "stream-json", "--verbose"),
        *("--allowedTools", "Bash,Read,Write", "--permission-mode", "acceptEdits"),
    )

    def turn(text: str, resumes: bool = False, exit_codes: tuple[int, ...] = (0,)) -> str:
        words = ("-p", *(("--continue",) if resumes else ()), *flags)
        return loopback.run(program, *words, stdin=text, exit_codes=exit_codes, **env)

    return turn


def codex(loopback: Loopback) -> Turn:
    program = installed(CODEX) / "codex"
    folder = loopback.home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(f"""
model = "{NAME}"
model_provider = "pdserve"
model_context_window = {loopback.context_len}
check_for_update_on_startup = false
show_raw_agent_reasoning = true
[analytics]
enabled = false
[model_providers.pdserve]
name = "pdserve"
base_url = "{loopback.url}/v1"
wire_api = "responses"
stream_idle_timeout_ms = {IDLE_MS}
request_max_retries = 0
stream_max_retries = 0
""")

    def turn(text: str, resumes: bool = False, exit_codes: tuple[int, ...] = (0,)) -> str:
        flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        words = ("exec", *flags, *(("resume", "--last") if resumes else ()), "-")
        return loopback.run(program, *words, stdin=text, exit_codes=exit_codes)

    return turn


def opencode(loopback: Loopback) -> Turn:
    program = installed(OPENCODE) / "opencode"
    folder = loopback.home / ".config/opencode"
    folder.mkdir(parents=True)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{loopback.url}/v1", "chunkTimeout": int(IDLE_MS)},
        "models": {
            NAME: {
                "reasoning": True,
                "tool_call": True,
                "limit": {"context": CONTEXT_LEN, "output": 32000},
            }
        },
    }
    config = {
        "provider": {"pdserve": provider},
        "model": f"pdserve/{NAME}",
        "small_model": f"pdserve/{NAME}",
        "permission": {"bash": "allow", "edit": "allow"},
        "autoupdate": False,
        "share": "disabled",
    }
    (folder / "opencode.json").write_text(json.dumps(config))
    env = {
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    }

    def turn(text: str, resumes: bool = False, exit_codes: tuple[int, ...] = (0,)) -> str:
        flags = ("--format", "json", "--thinking")
        words = ("run", *flags, *(("--continue",) if resumes else ()), text)
        return loopback.run(program, *words, exit_codes=exit_codes, **env)

    return turn


@pytest.mark.parametrize("agent", [claude_code, codex, opencode], ids=lambda one: one.__name__)
def test_a_session(agent: Agent, tmp_path: Path) -> None:
    with Loopback(tmp_path, CONTEXT_LEN) as loopback:
        (loopback.work / SEEN).touch()
        long_file = loopback.work / "long.txt"
        turn = agent(loopback)
        first = turn(f"[[list {loopback.work}]]")
        assert "The tool has answered: " in first
        assert SEEN in first.split("The tool has answered: ")[1]
        assert THOUGHT in first
        turn(f"[[write {long_file}]]", resumes=True)
        assert long_file.read_text() == LONG_TEXT
        assert "turn 3 with 2 results" in turn("[[recall]]", resumes=True)


# The tokens of each agent's own prompt leave room for two texts, not for three. OpenCode also exits
# with 1 after an overflow from which it has recovered.
@pytest.mark.parametrize(
    ("agent", "context_len", "exit_codes"),
    [(claude_code, 63_000, (0,)), (codex, 30_000, (0,)), (opencode, 35_000, (0, 1))],
    ids=("claude_code", "codex", "opencode"),
)
def test_an_overflow(
    agent: Agent, context_len: int, exit_codes: tuple[int, ...], tmp_path: Path
) -> None:
    with Loopback(tmp_path, context_len) as loopback:
        turn = agent(loopback)
        text = loopback.work / "text.txt"
        text.write_text("The tide comes in, and the boats rise.\n" * 560)
        for number in range(1, 4):
            turn(f"[[read {text}]]", resumes=number > 1, exit_codes=exit_codes)
        longest = max(len(note["prompt"]) for note in loopback.notes)
        assert "All is well." in turn("[[say All is well.]]", resumes=True)
        # A summary has replaced the texts.
        assert len(loopback.notes[-1]["prompt"]) < longest
        if agent is not codex:  # which counts the context itself
            assert "finish=CONTEXT_LENGTH_EXCEEDED" in loopback.log
