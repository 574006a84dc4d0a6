"""`pdserve chat`: a conversation with a model in the terminal; with piped input, a response to each
line.

The client keeps the history of the conversation; the server keeps none.
"""

import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from shutil import get_terminal_size
from textwrap import fill
from typing import Any, TextIO

from pdserve.cli.chat_terminal import (
    AnswerView,
    hidden_keys,
    history_file,
    piped_lines,
    typed_lines,
    view_on,
)
from pdserve.cli.commands import STOPPED
from pdserve.cli.http_client import ApiClient, ApiError, client_of
from pdserve.cli.options import MAX_TEMPERATURE, ChatSettings, ConversationSettings, Settings

CHAT = "/v1/chat/completions"


class Conversation:
    """The messages of a conversation so far, and the sampling params for the next request."""

    def __init__(
        self, client: ApiClient, model: Mapping[str, Any], settings: ConversationSettings
    ) -> None:
        """Begin a conversation. `model` is the model's entry in the server's response to
        /v1/models."""
        self.client = client
        self.model = str(model["id"])
        self.context_len = int(model.get("max_model_len") or 0)
        self.recommended: dict[str, float] | None = model.get("default_sampling_params")
        self.temperature = settings.temperature if settings.temperature >= 0 else None
        self.max_tokens = settings.max_tokens
        self.system = settings.system
        self.messages: list[dict[str, str]] = []
        self.question = ""  # the last question, with or without a response
        self.reasoning = ""  # of the last response
        self._previous_messages = self.messages  # messages before the last question

    @property
    def sampling(self) -> str:
        """The sampling params of the next request and where they come from, as text for the
        user."""
        recommended = dict(self.recommended or {})
        if self.temperature is not None:
            recommended.pop("temperature", None)
        texts = (
            [] if self.temperature is None else [f"temperature {self.temperature:g} (set by you)"]
        )
        if self.recommended is None:
            return ", ".join(texts) or "sampling with the server's defaults"
        parts = [f"{name} {value:g}" for name, value in recommended.items()]
        if parts:
            texts.append(f"{', '.join(parts)} (recommended for this model)")
        return ", ".join(texts) or "temperature 1 (the model recommends nothing else)"

    def reset(self) -> None:
        """Forget all messages; `retry` can still send the last question."""
        self.messages = self._previous_messages = []

    def ask(self, text: str, view: AnswerView) -> bool:
        """Send a question with the messages so far, and show the response as it arrives. The
        question and the response become messages, unless there is no response.

        Returns False if Ctrl-C stopped the response; the text received until then is kept. Raises
        ApiError if the request fails.
        """
        self.question = text
        self._previous_messages = self.messages
        question = {"role": "user", "content": text}
        parts: list[str] = []
        thoughts: list[str] = []
        note = ""
        ended = True
        try:
            with closing(self._events([*self.messages, question])) as events:
                for event in events:
                    note = self._take(event, parts, thoughts, view) or note
        except KeyboardInterrupt:
            ended, note = False, "[stopped]"
        finally:
            self.reasoning = "".join(thoughts)
            view.end(note)
        if parts:
            answer = {"role": "assistant", "content": "".join(parts)}
            self.messages = [*self.messages, question, answer]
        return ended

    def retry(self, view: AnswerView) -> bool:
        """Send the last question again, and replace its response; if no new response arrives, the
        old one stays. Returns and raises like `ask`."""
        saved_messages, self.messages = self.messages, self._previous_messages
        try:
            return self.ask(self.question, view)
        finally:
            if self.messages is self._previous_messages:
                self.messages = saved_messages

    def _take(
        self, event: dict[str, Any], parts: list[str], thoughts: list[str], view: AnswerView
    ) -> str:
        """Show the text in an event of the response. Returns a note for the user if the event says
        that the response was cut off by a token limit; empty otherwise."""
        note = ""
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if thought := delta.get("reasoning_content"):
                thoughts.append(thought)
                view.think(thought)
            if text := delta.get("content"):
                parts.append(text)
                view.write(text)
            if choice.get("finish_reason") == "length":
                note = f"[truncated {self._limit_text()}]"
        usage = event.get("usage") or {}
        is_full = usage.get("total_tokens", 0) >= self.context_len > 0
        if is_full and usage.get("completion_tokens", 0) != self.max_tokens:
            note = f"[the context of {self.context_len} tokens is full; /reset clears it]"
        return note

    def _limit_text(self) -> str:
        """Return which limit has truncated a response, as text for the user."""
        if self.max_tokens:
            return f"after {self.max_tokens} tokens by --max-tokens"
        if recommended := (self.recommended or {}).get("max_tokens"):
            return (
                f"after {recommended} tokens, the server's default for this model; see --max-tokens"
            )
        return "at the token limit of the server"

    def _events(self, messages: list[dict[str, str]]) -> Generator[dict[str, Any], None, None]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*system, *messages],
            "stream_options": {"include_usage": True},
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.max_tokens:
            body["max_tokens"] = self.max_tokens
        return self.client.stream(CHAT, body)


def first_model(client: ApiClient, name: str) -> dict[str, Any]:
    """Return the entry of /v1/models with this name; if the name is empty, the first entry. Raises
    ApiError if the server has no such model."""
    models = client.models()
    if not models:
        raise ApiError(f"{client.url} serves no model yet", 503)
    matches = [model for model in models if not name or model["id"] == name]
    if not matches:
        names = ", ".join(model["id"] for model in models)
        raise ApiError(
            f"{client.url} does not serve {name!r}; choose one of its models with --model: {names}",
            404,
        )
    return matches[0]


COMMANDS = {
    "/help": "list the commands and keys",
    "/reset": "clear the conversation",
    "/retry": "ask the last question again",
    "/system": "TEXT: set the system message; without TEXT, remove it",
    "/temperature": "X: set the temperature (0: greedy); without X, use the recommended one",
    "/reasoning": "show the reasoning of the last answer; on, off: stream it, or fold it",
    "/exit": "quit; so does Ctrl-D",
}
KEYS = (
    "Enter: send. Alt-Enter, or a backslash at the end of a line and Enter: start a new line. "
    "Up and Down: earlier lines. Ctrl-C: stop an answer, or clear the line."
)


class Repl:
    """The read-eval-print loop of the chat: sends each line as a question, or runs it as a
    /command."""

    def __init__(
        self, conversation: Conversation, make_view: Callable[[bool], AnswerView], out: TextIO
    ) -> None:
        """`make_view(shows_reasoning)` makes the view in which one response is displayed."""
        self._conversation = conversation
        self._make_view = make_view
        self._out = out
        self._shows_reasoning = False

    def run(self, lines: Iterable[str], *, typed: bool = True) -> int:
        """Process each line; return the exit code, which is 1 if a request failed. Ctrl-C during a
        response stops that response; unless the lines are `typed`, it also ends the loop with
        STOPPED."""
        code = 0
        for line in lines:
            command, _, argument = line.strip().partition(" ")
            if not command:
                continue
            if command in ("/exit", "/quit"):
                break
            if command.startswith("/") and (command != "/retry" or not self._conversation.question):
                print(self._run_command(command, argument.strip()), file=self._out, flush=True)
                continue
            outcome = self._answer(line if command != "/retry" else None)
            if outcome == STOPPED and not typed:
                return STOPPED
            code = 1 if outcome == 1 else code
        return code

    def _answer(self, question: str | None) -> int:
        """Send a question and show the response; None sends the last question again. Returns 0, 1
        if the request failed, or STOPPED if Ctrl-C stopped it."""
        try:
            with hidden_keys():
                view = self._make_view(self._shows_reasoning)
                if question is None:
                    ended = self._conversation.retry(view)
                else:
                    ended = self._conversation.ask(question, view)
        except ApiError as error:
            print(f"error: {error}{error.advice}", file=sys.stderr, flush=True)
            return 1
        except KeyboardInterrupt:  # before the question was sent
            return STOPPED
        return 0 if ended else STOPPED

    def _run_command(self, command: str, argument: str) -> str:
        """Run a /command of the chat; return the text to show the user."""
        conversation = self._conversation
        if command == "/help":
            width = get_terminal_size().columns
            indent = " " * 16
            rows = [
                fill(f"  {name:14}{text}", width, subsequent_indent=indent)
                for name, text in COMMANDS.items()
            ]
            rows += [fill(text, width) for text in (KEYS, f"Sampling: {conversation.sampling}.")]
            return "\n".join(rows)
        if command == "/reset":
            conversation.reset()
            return "the conversation is cleared"
        if command == "/retry":
            return "there is no question yet"
        if command == "/system":
            conversation.system = argument
            return "the system message is set" if argument else "the system message is removed"
        if command == "/temperature":
            return self._set_temperature(argument)
        if command == "/reasoning":
            if argument in ("on", "off"):
                self._shows_reasoning = argument == "on"
                return f"reasoning is {'streamed' if argument == 'on' else 'folded'}"
            return conversation.reasoning.strip() or "the last answer has no reasoning"
        return f"{command} is unknown; /help lists the commands"

    def _set_temperature(self, text: str) -> str:
        if not text:
            self._conversation.temperature = None
        else:
            try:
                value = float(text)
            except ValueError:
                return f"{text!r} is not a number"
            if not 0 <= value <= MAX_TEMPERATURE:
                return f"the temperature must be 0 to {MAX_TEMPERATURE:g}"
            self._conversation.temperature = value
        return self._conversation.sampling


def run(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Run the chat until /exit or the end of the input; return the exit code. Raises ApiError if
    the server cannot be reached at the start."""
    chat = settings.build(ChatSettings)
    client = client_of(chat)
    return converse(Conversation(client, first_model(client, chat.model), chat), chat.history)


def converse(conversation: Conversation, keeps_history: bool) -> int:
    """Answer what the user types, or the lines of a pipe, until /exit or the end of the input;
    return the exit code."""
    typed = sys.stdin.isatty()
    if typed:
        where = f"{conversation.model} at {conversation.client.url}"
        print(f"{where}. Type /help for help.\n{conversation.sampling}")
        lines = typed_lines(history_file() if keeps_history else None, COMMANDS)
    else:
        lines = piped_lines()
    repl = Repl(conversation, lambda shows: view_on(sys.stdout, shows), sys.stdout)
    return repl.run(lines, typed=typed)
