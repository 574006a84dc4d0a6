"""`pdserve chat` as a user sees it: in a pseudo terminal, with keys."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes.api_server import CONTEXT_FULL, STALL, ApiServer, api_server, ends, says
from systems.eventually import wait_until
from systems.terminal import Terminal, in_terminal

from pdserve.cli.commands import STOPPED

MODEL = {"id": "tiny", "max_model_len": 100, "default_sampling_params": {"temperature": 0.2}}
PROMPT = ">"  # keys typed before it are ignored
WITH_THE_EXTRA = """
import sys
from pdserve.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
WITHOUT_THE_EXTRA = """
import sys
sys.modules.update(rich=None, prompt_toolkit=None)
from pdserve.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
UP, ALT_ENTER, CTRL_C, CTRL_D = "\x1b[A", "\x1b\r", "\x03", "\x04"


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with api_server() as made:
        made.models = [MODEL]
        made.events = [*says("It is **Paris**."), *ends(total_tokens=9)]
        yield made


@contextmanager
def pdserve(*words: str, data: Path | None = None) -> Iterator[Terminal]:
    command = [sys.executable, "-m", "pdserve.cli.main", *words]
    env = {"XDG_DATA_HOME": str(data)} if data else {}
    with in_terminal(command, env) as terminal:
        yield terminal


def requests_of(server: ApiServer, count: int = 1) -> list[str]:
    """Return the last messages of that many questions, once they have arrived."""
    wait_until(lambda: len(server.requests) >= count, "questions")
    return [body["messages"][-1]["content"] for body in server.requests]


def test_a_conversation(server: ApiServer, tmp_path: Path) -> None:
    with pdserve("chat", "--url", server.url, data=tmp_path) as terminal:
        start = terminal.wait_for(PROMPT)
        assert f"tiny at {server.url}. Type /help for help." in start
        assert "temperature 0.2 (recommended for this model)" in start
        terminal.enter("What is the capital of France?")
        assert "**" not in terminal.wait_for("Paris.")
        terminal.wait_for(PROMPT)
        terminal.enter("/help")
        terminal.wait_for("/reset")
        terminal.wait_for(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    with pdserve("chat", "--url", server.url, data=tmp_path) as terminal:  # the arrow keys use it
        terminal.wait_for(PROMPT)
        terminal.type(UP)
        terminal.type(UP)
        terminal.wait_for("capital of France?")
        terminal.enter("")
        terminal.wait_for("Paris.")
        terminal.wait_for(PROMPT)
        terminal.enter("/exit")
        assert terminal.end() == 0
    assert requests_of(server) == ["What is the capital of France?"] * 2
    assert (tmp_path / "pdserve/chat_history").stat().st_mode & 0o077 == 0


def test_a_question_of_several_lines(server: ApiServer) -> None:
    with pdserve("chat", "--url", server.url, "--no-history") as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("one" + ALT_ENTER + "two\\\r")
        terminal.enter("three")
        terminal.wait_for("Paris.")
    assert requests_of(server) == ["one\ntwo\nthree"]


def test_lines_are_plain_without_the_extra(server: ApiServer, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_THE_EXTRA, "chat", "--url", server.url]
    for lines in (["one\\", "two"], [UP]):  # the second run has the history of the first
        with in_terminal(command, {"XDG_DATA_HOME": str(tmp_path)}) as terminal:
            terminal.wait_for(PROMPT)
            for line in lines:
                terminal.enter(line)
            terminal.wait_for("It is **Paris**.")
            terminal.wait_for(PROMPT)
            terminal.type(CTRL_D)
            assert terminal.end() == 0
    assert requests_of(server, 2) == ["one\ntwo", "two"]


def test_ctrl_c_clears_a_typed_line(server: ApiServer) -> None:
    with pdserve("chat", "--url", server.url, "--no-history") as terminal:
        terminal.wait_for(PROMPT)
        for text in ("abc", "XYZ"):
            terminal.type(text)
            terminal.wait_for(text)
            terminal.type(CTRL_C)
        terminal.enter("sent")
        terminal.wait_for("Paris.")
        terminal.wait_for(PROMPT)
        terminal.type(CTRL_C)
        terminal.wait_for("press Ctrl-C again")
        terminal.wait_for(PROMPT)
        terminal.type(CTRL_C)
        assert terminal.end() == 0
    assert requests_of(server) == ["sent"]


def test_ctrl_c_stops_the_answer_and_not_the_conversation(server: ApiServer) -> None:
    server.events = [*says("and so on"), STALL]
    with pdserve("chat", "--url", server.url) as terminal:
        terminal.wait_for(PROMPT)
        terminal.enter("talk")
        terminal.wait_for("and so on")
        terminal.type(CTRL_C)
        terminal.wait_for("[stopped]")
        server.events = [*says("fine"), *ends()]
        terminal.enter("again")
        terminal.wait_for("fine")
        terminal.wait_for(PROMPT)
        terminal.type(CTRL_C)
        terminal.wait_for("or type /exit, to quit")
        terminal.wait_for(PROMPT)
        terminal.type(CTRL_C)
        assert terminal.end() == 0
    assert [m["content"] for m in server.requests[1]["messages"]] == ["talk", "and so on", "again"]


def test_keys_typed_during_an_answer_are_for_the_next_prompt(server: ApiServer) -> None:
    server.events = [*says("and so on"), STALL, *ends()]
    with pdserve("chat", "--url", server.url) as terminal:
        terminal.wait_for(PROMPT)
        terminal.enter("talk")
        terminal.wait_for("and so on")
        terminal.enter("go on")
        server.go_on.set()
        assert "go on" not in terminal.wait_for(PROMPT)
        assert requests_of(server, 2) == ["talk", "go on"]


@pytest.mark.parametrize("broken", ["folder", "full"])
def test_chat_works_without_a_history(server: ApiServer, tmp_path: Path, broken: str) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    code = f"{limit if broken == 'full' else ''}\n{WITH_THE_EXTRA}"
    (tmp_path / "pdserve").mkdir()
    if broken == "folder":
        (tmp_path / "pdserve/chat_history").mkdir()
    command = [sys.executable, "-c", code, "chat", "--url", server.url]
    with in_terminal(command, {"XDG_DATA_HOME": str(tmp_path)}) as terminal:
        terminal.wait_for(PROMPT)
        terminal.enter("hi")
        terminal.wait_for("Paris.")
        terminal.wait_for(PROMPT)
        terminal.enter("/exit")
        assert terminal.end() == 0
    assert "Exception" not in terminal.text


def test_ctrl_c_ends_the_lines_of_a_pipe(server: ApiServer) -> None:
    server.events = [*says("and so on"), STALL]
    command = [sys.executable, "-m", "pdserve.cli.main", "chat", "--url", server.url]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"one\ntwo\n")
        process.stdin.close()
        assert process.stdout.read(9) == b"and so on"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == b"\n"
        assert process.stderr.read() == b"[stopped]\n"
    assert process.returncode == STOPPED
    assert requests_of(server) == ["one"]


def test_a_pipe_in_another_encoding(server: ApiServer) -> None:
    server.events = [*says("caf\u00e9 \ud800"), *ends()]
    command = [sys.executable, "-m", "pdserve.cli.main", "chat", "--url", server.url]
    env = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run(command, input=b"a\xffb\n", capture_output=True, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"caf? ?\n", b"")
    assert requests_of(server) == ["a\ufffdb"]


def test_reasoning_is_folded(server: ApiServer) -> None:
    server.events = [*says("42", thinks="six times seven"), *ends()]
    with pdserve("chat", "--url", server.url) as terminal:
        terminal.wait_for(PROMPT)
        terminal.enter("what?")
        assert "six times" not in terminal.wait_for("/reasoning shows it)")
        terminal.wait_for("42")
        terminal.wait_for(PROMPT)
        terminal.enter("/reasoning")
        terminal.wait_for("six times seven")


def test_a_wrong_key_is_reported(server: ApiServer) -> None:
    server.key = "right"
    with pdserve("chat", "--url", server.url) as terminal:
        terminal.wait_for("Pass the server's key with --api-key")
        assert terminal.end() == 1
    assert "Traceback" not in terminal.text


def test_a_wrong_flag_gets_a_suggestion(server: ApiServer) -> None:
    with pdserve("chat", "--ulr", server.url) as terminal:
        terminal.wait_for("--ulr is unknown (did you mean --url?)")
        assert terminal.end() == 2
    assert "Traceback" not in terminal.text


def test_a_full_context_names_reset(server: ApiServer) -> None:
    with pdserve("chat", "--url", server.url) as terminal:
        terminal.wait_for(PROMPT)
        server.reply = lambda body: (400, CONTEXT_FULL)
        terminal.enter("one more")
        terminal.wait_for("Type /reset to clear the conversation")
        server.reply = None
        terminal.enter("/reset")
        terminal.wait_for("is cleared")
        terminal.wait_for(PROMPT)
        terminal.enter("again")
        terminal.wait_for("Paris.")
    assert len(server.requests[-1]["messages"]) == 1


def test_a_server_that_stops_during_an_answer(server: ApiServer) -> None:
    server.events = says("half")
    with pdserve("chat", "--url", server.url) as terminal:
        terminal.wait_for(PROMPT)
        terminal.enter("hi")
        terminal.wait_for("the response ended early")
    assert "Traceback" not in terminal.text
