"""A conversation against a small HTTP server: history, commands, errors and drawing."""

import io
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fakes.api_server import CONTEXT_FULL, ApiServer, api_server, ends, says
from systems.terminal import on_screen

from pdserve.cli.chat import COMMANDS, Conversation, Repl
from pdserve.cli.chat_terminal import MarkdownView, PlainView
from pdserve.cli.http_client import ApiClient
from pdserve.cli.main import main
from pdserve.cli.options import ChatSettings

TINY = {"id": "tiny", "max_model_len": 100, "default_sampling_params": {"temperature": 0.2}}


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with api_server() as made:
        made.models = [TINY]
        yield made


class TerminalText(io.StringIO):
    """Text that a user would see."""

    def isatty(self) -> bool:
        return True


def talking(server: ApiServer, **settings: Any) -> tuple[Repl, Conversation, io.StringIO]:
    out = io.StringIO()
    chat = Conversation(ApiClient(server.url), TINY, ChatSettings(**settings))
    return Repl(chat, lambda shows: PlainView(out, shows), out), chat, out


def test_a_conversation_keeps_its_history(server: ApiServer) -> None:
    server.events = [*says("Hel", "lo"), *ends(total_tokens=5)]
    talk, _, out = talking(server, system="be brief", temperature=0.0, max_tokens=9)
    assert talk.run(["hi", "", "again"]) == 0
    assert out.getvalue() == "Hello\nHello\n"
    first, second = server.requests
    roles = [m["role"] for m in second["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"] == "Hello"
    assert (first["temperature"], first["max_tokens"], first["stream"]) == (0.0, 9, True)


def test_commands_of_a_conversation(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    server.events = [*says("x"), "[DONE]"]
    talk, _, out = talking(server)
    lines = ["one", "/system be kind", "/reset", "/dance", "/help", "two", "/exit", "three"]
    assert talk.run(lines) == 0
    assert [m["content"] for m in server.requests[-1]["messages"]] == ["be kind", "two"]
    assert len(server.requests) == 2
    assert "/dance is unknown" in out.getvalue()
    assert all(f"  {name}" in out.getvalue() for name in COMMANDS)
    assert max(map(len, out.getvalue().splitlines())) <= 60
    assert "temperature" not in server.requests[0]


def test_the_temperature_can_be_set_and_reset(server: ApiServer) -> None:
    server.events = [*says("x"), "[DONE]"]
    talk, chat, out = talking(server)
    assert chat.sampling == "temperature 0.2 (recommended for this model)"
    talk.run(["/temperature 0.5", "one", "/temperature", "two", "/temperature x", "/temperature 9"])
    assert [body.get("temperature") for body in server.requests] == [0.5, None]
    assert "temperature 0.5 (set by you)" in out.getvalue()
    assert "'x' is not a number" in out.getvalue()
    assert "the temperature must be 0 to 2" in out.getvalue()


def test_sampling_of_a_server_that_reports_none() -> None:
    chat = Conversation(ApiClient("http://x"), {"id": "m"}, ChatSettings())
    assert chat.sampling == "sampling with the server's defaults"
    model = {"id": "m", "default_sampling_params": {}}
    chat = Conversation(ApiClient("http://x"), model, ChatSettings())
    assert chat.sampling.startswith("temperature 1 ")


def test_a_truncated_answer_names_its_limit(server: ApiServer, subtests: pytest.Subtests) -> None:
    server.events = [*says("x"), *ends("length", total_tokens=5)]
    for recommended, max_tokens, note in (
        (
            {"max_tokens": 7},
            0,
            "after 7 tokens, the server's default for this model; see --max-tokens",
        ),
        ({"max_tokens": 7}, 4, "after 4 tokens by --max-tokens"),
        ({}, 0, "at the token limit of the server"),
    ):
        with subtests.test(note):
            model = {"id": "tiny", "default_sampling_params": recommended}
            chat = Conversation(ApiClient(server.url), model, ChatSettings(max_tokens=max_tokens))
            out = TerminalText()
            chat.ask("hi", PlainView(out, False))
            assert out.getvalue() == f"x [truncated {note}]\n"


def test_retry_asks_the_last_question_again(server: ApiServer) -> None:
    server.events = [*says("first"), "[DONE]"]
    talk, chat, out = talking(server)
    assert talk.run(["/retry", "hi", "/retry"]) == 0
    assert out.getvalue() == "there is no question yet\nfirst\nfirst\n"
    assert [m["content"] for m in server.requests[1]["messages"]] == ["hi"]
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]
    server.events = ['{"error": {"message": "gone"}}']
    assert talk.run(["/retry"]) == 1
    assert [m["content"] for m in chat.messages] == ["hi", "first"]


def test_retry_asks_a_question_that_failed(server: ApiServer) -> None:
    talk, chat, _ = talking(server)
    fails, answers = ['{"error": "gone"}'], [*says("x"), "[DONE]"]
    server.events = answers
    talk.run(["hi", "hi"])
    server.events = fails
    talk.run(["/retry"])
    assert [m["content"] for m in chat.messages] == ["hi", "x", "hi", "x"]
    talk.run(["more"])
    server.events = answers
    talk.run(["/retry"])
    assert [m["content"] for m in chat.messages][-2:] == ["more", "x"]
    talk.run(["/reset", "/retry"])
    assert [m["content"] for m in chat.messages] == ["more", "x"]


def test_ctrl_c_before_the_question_is_sent(server: ApiServer) -> None:
    def interrupted(shows: bool) -> PlainView:
        raise KeyboardInterrupt

    _, chat, out = talking(server)
    assert Repl(chat, interrupted, out).run(["hi", "/reset"]) == 0
    assert "is cleared" in out.getvalue()
    assert not server.requests


def test_a_missing_answer_sets_the_exit_code(server: ApiServer) -> None:
    talk, _, _ = talking(server)
    lines = iter(["one", "two"])

    def typed() -> Iterator[str]:
        for line in lines:
            server.events = [] if line == "one" else [*says("x"), "[DONE]"]
            yield line

    assert talk.run(typed()) == 1


def test_reasoning_is_folded_until_requested(server: ApiServer) -> None:
    server.events = [*says("42", thinks="six times seven"), "[DONE]"]
    talk, chat, out = talking(server)
    talk.run(["what?"])
    assert out.getvalue() == "42\n"
    talk.run(["/reasoning", "/reasoning on", "what?"])
    shown = out.getvalue()
    assert shown.startswith("42\nsix times seven\n")
    assert shown.endswith("six times seven42\n")
    assert all("six" not in m["content"] for m in chat.messages)


def test_a_question_that_fails_is_forgotten(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.events = ['{"error": {"message": "the worker went away"}}']
    talk, chat, _ = talking(server)
    assert talk.run(["hi"]) == 1
    assert "the worker went away" in capsys.readouterr().err
    assert chat.messages == []
    server.events = says("half an ans")  # then the connection ends
    assert talk.run(["hi"]) == 1
    assert "ended early" in capsys.readouterr().err
    assert chat.messages == []


def test_the_end_of_the_context_names_reset(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    talk, _, out = talking(server)
    server.events = [*says("long"), *ends("length", total_tokens=100, completion_tokens=60)]
    assert talk.run(["hi"]) == 0
    assert out.getvalue() == "long\n"  # because it is for a pipe
    assert "the context of 100 tokens is full; /reset" in capsys.readouterr().err
    server.reply = lambda body: (400, CONTEXT_FULL)
    assert talk.run(["hi"]) == 1
    assert "Type /reset to clear the conversation" in capsys.readouterr().err


def test_an_answer_cut_by_max_tokens_says_so(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    talk, _, _ = talking(server, max_tokens=3)
    server.events = [*says("a b c"), *ends("length", total_tokens=9, completion_tokens=3)]
    talk.run(["hi"])
    assert "[truncated after 3 tokens by --max-tokens]" in capsys.readouterr().err
    talk, _, _ = talking(server)
    talk.run(["hi"])
    assert "[truncated at the token limit of the server]" in capsys.readouterr().err


def test_chat_without_a_server_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 1
    err = capsys.readouterr().err
    assert "http://127.0.0.1:9" in err
    assert "pdserve up" in err


def test_a_wrong_key_and_a_wrong_model_are_reported(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.key = "right"
    for words in ([], ["--api-key", "wrong"]):
        assert main(["chat", "--url", server.url, *words]) == 1
        err = capsys.readouterr().err
        assert "--api-key" in err
        assert "pdserve up" not in err
    assert main(["chat", "--url", server.url, "--api-key", "right", "--model", "big"]) == 1
    assert (
        "does not serve 'big'; choose one of its models with --model: tiny"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("models", [5, None, [1], [{"name": "x"}], [{"id": 1}]])
def test_a_server_of_another_kind_is_reported(
    models: Any, server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.models = models
    for command in ("chat", "models", "bench"):
        assert main([command, "--url", server.url]) == 1
        assert "check that " in capsys.readouterr().err


@pytest.mark.parametrize("event", ["5", "[]", '{"error": "no"}', '{"choices": null}'])
def test_events_of_another_kind_are_reported(event: str, server: ApiServer) -> None:
    server.events = [event, '{"choices": [{"delta": null}]}']
    assert talking(server)[0].run(["hi"]) == 1


def test_chat_reads_from_a_pipe(
    server: ApiServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.events = [*says("**fine**", thinks="hm"), "[DONE]"]
    monkeypatch.setattr("sys.stdin", io.StringIO("how are you\n"))
    assert main(["chat", "--url", server.url, "--api-key", "k"]) == 0
    assert capsys.readouterr().out == "**fine**\n"
    assert server.requests[0]["model"] == "tiny"
    assert server.keys[-1] == "Bearer k"


def drawn(pieces: list[str], thinks: str = "") -> str:
    """Return the final contents of the screen."""
    out = TerminalText()
    view = MarkdownView(out, shows_reasoning=False)
    if thinks:
        view.think(thinks)
    for piece in pieces:
        view.write(piece)
    view.end()
    return "\n".join(on_screen(out.getvalue()))


MARKDOWN = """# Title

Some **bold** words, and so many more of them that they do not fit into one line of a terminal.
Then another sentence.

- one
- two

```python
x = 1

y = 2
```

1. a
2. b

The end.
"""


def test_markdown_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is on the screen once, in order, however the text arrives and however often it
    is redrawn.
    """
    monkeypatch.setattr("pdserve.cli.chat_terminal.FRAME_S", 0.0)
    monkeypatch.setattr("pdserve.cli.chat_terminal.PAUSE", 0)
    shown = drawn([MARKDOWN[n : n + 3] for n in range(0, len(MARKDOWN), 3)])
    assert shown.rstrip() == drawn([MARKDOWN]).rstrip()
    rows = [row.strip() for row in shown.splitlines() if row.strip()]
    assert rows == [
        "Title",
        "Some bold words, and so many more of them that they do not fit into one line of",
        "a terminal. Then another sentence.",
        "• one",
        "• two",
        "x = 1",
        "y = 2",
        "1 a",
        "2 b",
        "The end.",
    ]


def test_a_block_that_is_slow_to_draw_is_drawn_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))  # each reading is a second later
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    out = TerminalText()
    view = MarkdownView(out, shows_reasoning=False)
    for _ in range(40):
        view.write("x")
    pictures = re.findall("x+", out.getvalue())
    assert 4 <= len(pictures) <= 10  # of 40


def test_an_answer_cannot_control_the_terminal() -> None:
    nasty = "a\x1b]0;title\x07b\x9b2Jc\r\td\n"
    assert drawn([nasty]).split() == ["a]0;titleb2Jc", "d"]
    for out, wanted in ((TerminalText(), "a]0;titleb2Jc\td\n"), (io.StringIO(), nasty)):
        PlainView(out, shows_reasoning=False).write(nasty)
        assert out.getvalue() == wanted


def test_reasoning_is_one_line() -> None:
    shown = drawn(["done"], thinks="secret thoughts")
    assert "thought for" in shown
    assert "secret" not in shown
    assert "done" in shown
