"""Client libraries: each script of `sessions` lists a folder, writes a long file, recalls both and
continues after a prompt that is too long. The script of instructor has typed answers instead of
files.
"""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from clients.installed import installed
from clients.loopback import Loopback
from clients.pins import (
    AI_SDK,
    INSTRUCTOR,
    LANGCHAIN,
    LITELLM,
    LLM,
    OPENAI_AGENTS,
    PYDANTIC_AI,
    Pin,
)
from fakes.agent_model import LONG_TEXT, NAME, THOUGHT

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]

SESSIONS = Path(__file__).parent / "sessions"
SEEN = "harbour-lights.txt"
PROVIDERS = ("openai-compatible", "openai chat", "openai responses", "anthropic")
PYTHON_SESSIONS = {
    "litellm": LITELLM,
    "langchain": LANGCHAIN,
    "agents": OPENAI_AGENTS,
    "pydantic_ai": PYDANTIC_AI,
}


@pytest.fixture
def loopback(tmp_path: Path) -> Iterator[Loopback]:
    with Loopback(tmp_path, context_len=16384) as loopback:
        (loopback.work / SEEN).touch()
        yield loopback


def wrote(loopback: Loopback) -> bool:
    return (loopback.work / "long.txt").read_text() == LONG_TEXT


@pytest.mark.parametrize(("name", "pin"), PYTHON_SESSIONS.items(), ids=PYTHON_SESSIONS)
def test_python(name: str, pin: Pin, loopback: Loopback) -> None:
    loopback.run(installed(pin) / "python", SESSIONS / f"{name}_session.py")
    assert wrote(loopback)


def test_instructor(loopback: Loopback) -> None:
    loopback.run(installed(INSTRUCTOR) / "python", SESSIONS / "instructor_session.py")


def test_open_webui(loopback: Loopback) -> None:
    loopback.run(sys.executable, SESSIONS / "openwebui_session.py")
    assert wrote(loopback)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_ai_sdk(provider: str, loopback: Loopback) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node")
    # Node resolves a module's packages from the folder of the module.
    script = installed(AI_SDK).parents[1] / "ai_sdk.mjs"
    shutil.copy(SESSIONS / script.name, script)
    loopback.run(node, script, PROVIDER=provider)
    assert wrote(loopback)


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_llm(api: str, loopback: Loopback) -> None:
    """llm has no option for time-outs, and shows reasoning of responses only."""
    program = installed(LLM) / "llm"
    models = loopback.home / "extra-openai-models.yaml"
    models.write_text(
        f"- model_id: {NAME}\n  model_name: {NAME}\n  api_base: {loopback.url}/v1\n"
        f"  supports_tools: true\n  responses: {str(api == 'responses').lower()}\n"
    )
    env = {"LLM_USER_PATH": str(loopback.home), "OPENAI_API_KEY": "a-key"}
    tools = ("--functions", SESSIONS / "tools.py", "--chain-limit", "5")

    def turn(text: str, *flags: str, exit_codes: tuple[int, ...] = (0,)) -> str:
        words = ("-m", NAME, *flags, *tools)
        return loopback.run(program, *words, stdin=text, exit_codes=exit_codes, **env)

    listed = turn("[[list .]]")
    assert f"The tool has answered: {SEEN}" in listed
    assert api == "chat" or THOUGHT in listed
    turn("[[write long.txt]]", "-c")
    assert wrote(loopback)
    assert "turn 3 with 2 results" in turn("[[recall]]", "-c")
    too_long = "[[recall]]" + " The tide comes in, and the boats rise." * 5000
    assert "maximum context length" in turn(too_long, "-c", exit_codes=(1,))
    assert "turn 4" in turn("[[recall]]", "-c")
