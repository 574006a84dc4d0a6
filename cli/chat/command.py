"""`pdserve chat`: a conversation in the terminal, or responses to the lines of a pipe."""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TextIO

from pdserve.cli.chat.conversation import AnswerView, Conversation, first_model
from pdserve.cli.chat.prompt import hidden_keys, history_file, piped_lines, typed_lines
from pdserve.cli.chat.view import view_on
from pdserve.cli.commands import STOPPED
from pdserve.cli.http_client import ApiError, advice, client_of
from pdserve.cli.options import MAX_TEMPERATURE, ChatSettings, Settings

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
    "Up and Down: earlier lines. Ctrl-C: stop an answer."
)


class Repl:
    """Reads lines; sends each as a question or runs it as a command."""

    def __init__(
        self, conversation: Conversation, make_view: Callable[[bool], AnswerView], out: TextIO
    ) -> None:
        """`make_view(shows_reasoning)` is called for each response."""
        self._conversation = conversation
        self._make_view = make_view
        self._out = out
        self._shows_reasoning = False

    def run(self, lines: Iterable[str], *, typed: bool = True) -> int:
        """Handle each line; the exit code is 1 if a response failed. Ctrl-C in a response ends the
        loop unless the lines are typed."""
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
        """Send a question, or the last one again if it is None. Returns 0, 1 without a response, or
        STOPPED after Ctrl-C."""
        try:
            with hidden_keys():
                view = self._make_view(self._shows_reasoning)
                if question is None:
                    ended = self._conversation.retry(view)
                else:
                    ended = self._conversation.ask(question, view)
        except ApiError as error:
            print(f"error: {error}{advice(error)}", file=sys.stderr, flush=True)
            return 1
        except KeyboardInterrupt:  # before the question was sent
            return STOPPED
        return 0 if ended else STOPPED

    def _run_command(self, command: str, argument: str) -> str:
        """Run a command; return its output for the user."""
        conversation = self._conversation
        if command == "/help":
            rows = [f"  {name:14}{text}" for name, text in COMMANDS.items()]
            return "\n".join([*rows, KEYS, f"Sampling: {conversation.sampling}."])
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
    """Chat until /exit or the end of input; return 1 if the server does not respond."""
    chat = settings.build(ChatSettings)
    try:
        client = client_of(chat)
        conversation = Conversation(client, first_model(client, chat.model), chat)
    except ApiError as error:
        print(f"pdserve chat: {error}{advice(error)}", file=sys.stderr)
        return 1
    typed = sys.stdin.isatty()
    if typed:
        print(
            f"{conversation.model} at {client.url}. Type /help for help.\n{conversation.sampling}"
        )
        lines = typed_lines(history_file() if chat.history else None, COMMANDS)
    else:
        lines = piped_lines()
    repl = Repl(conversation, lambda shows: view_on(sys.stdout, shows), sys.stdout)
    return repl.run(lines, typed=typed)
