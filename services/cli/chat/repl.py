"""The loop of a conversation: each line is a question or a /command."""

import sys
from collections.abc import Callable, Iterable
from typing import TextIO

from pdserve.services.cli.chat.conversation import AnswerView, Conversation
from pdserve.services.cli.chat.prompt import hidden_keys
from pdserve.services.cli.commands import STOPPED
from pdserve.services.cli.http_client import ApiError, advice
from pdserve.services.options.settings import MAX_TEMPERATURE

COMMANDS = {
    "/help": "list the commands and keys",
    "/reset": "forget the conversation",
    "/retry": "ask the last question again",
    "/system": "TEXT: set the system message; without a text there is none",
    "/temperature": "X: sample with it (0: greedy); without a number as the model recommends",
    "/reasoning": "show what it thought before the last answer; on, off: as it comes, or not",
    "/exit": "end, as does Ctrl-D",
}
KEYS = (
    "Enter sends. Alt-Enter, or a backslash at a line's end and Enter: another line. "
    "Up and down: earlier lines. Ctrl-C stops an answer."
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
            word, _, rest = line.strip().partition(" ")
            if not word:
                continue
            if word in ("/exit", "/quit"):
                break
            if word.startswith("/") and (word != "/retry" or not self._conversation.question):
                print(self._run_command(word, rest.strip()), file=self._out, flush=True)
                continue
            ended = self._answer(line if word != "/retry" else None)
            if ended == STOPPED and not typed:
                return STOPPED
            code = 1 if ended == 1 else code
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

    def _run_command(self, word: str, rest: str) -> str:
        """Run a command; return its output for the user."""
        conversation = self._conversation
        if word == "/help":
            rows = [f"  {name:14}{text}" for name, text in COMMANDS.items()]
            return "\n".join([*rows, KEYS, f"In force: {conversation.sampling}."])
        if word == "/reset":
            conversation.reset()
            return "the conversation is forgotten"
        if word == "/retry":
            return "there is no question yet"
        if word == "/system":
            conversation.system = rest
            return "the system message is set" if rest else "there is no system message now"
        if word == "/temperature":
            return self._set_temperature(rest)
        if word == "/reasoning":
            if rest in ("on", "off"):
                self._shows_reasoning = rest == "on"
                return f"reasoning is {'shown as it comes' if rest == 'on' else 'folded'}"
            return conversation.reasoning.strip() or "the last answer came without reasoning"
        return f"{word} is unknown; /help lists the commands"

    def _set_temperature(self, text: str) -> str:
        if not text:
            self._conversation.temperature = None
        else:
            try:
                value = float(text)
            except ValueError:
                return f"{text!r} is no number"
            if not 0 <= value <= MAX_TEMPERATURE:
                return f"a temperature is 0 to {MAX_TEMPERATURE:g}"
            self._conversation.temperature = value
        return self._conversation.sampling
