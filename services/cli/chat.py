"""`pdserve chat`: a conversation in the terminal. The history lives here, the server keeps none."""

import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing, suppress
from typing import Any, TextIO

from pdserve.services.cli.http_client import ApiClient, ApiError
from pdserve.services.options.settings import ChatSettings
from pdserve.services.options.sources import Settings

HELP = "/reset forgets the conversation, /system TEXT sets the system message, /exit ends"
NO_SERVER = "{}\nStart one with `pdserve up` in another terminal, or name one with --url."


def run(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Talk until /exit or the end of input; 1 if no server answers."""
    chat = settings.build(ChatSettings)
    try:
        client = ApiClient(chat.url, chat.api_key[0] if chat.api_key else "")
        model = chat.model or first_model(client)
    except ApiError as error:
        print(f"pdserve chat: {NO_SERVER.format(error)}", file=sys.stderr)
        return 1
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401  (line editing for input())
        print(f"{model} at {client.url}. {HELP}.")
    conversation = Conversation(client, model, chat, sys.stdout)
    return talk(conversation, prompts("> " if interactive else ""), sys.stdout)


def first_model(client: ApiClient) -> str:
    """The server's first model. Raises ApiError."""
    models = client.get_json("/v1/models").get("data") or []
    if not models:
        raise ApiError(f"{client.url} serves no model yet")
    return str(models[0]["id"])


def prompts(sign: str) -> Iterable[str]:
    """Lines that the person types; Ctrl-C at the prompt or Ctrl-D ends them."""
    while True:
        try:
            yield input(sign)
        except (EOFError, KeyboardInterrupt):
            return


class Conversation:
    """Messages so far, and how to get the next one."""

    def __init__(self, client: ApiClient, model: str, settings: ChatSettings, out: TextIO) -> None:
        self._client = client
        self._out = out
        self._body: dict[str, Any] = {"model": model}
        if settings.temperature >= 0:
            self._body["temperature"] = settings.temperature
        if settings.max_tokens:
            self._body["max_tokens"] = settings.max_tokens
        self.system = settings.system
        self.messages: list[dict[str, str]] = []

    def obey(self, word: str, rest: str) -> str:
        """Carry out a command; what to tell the person."""
        if word == "/reset":
            self.messages.clear()
            return "the conversation is forgotten"
        if word == "/system":
            self.system = rest
            return "the system message is set" if rest else "there is no system message now"
        return HELP if word == "/help" else f"{word} is unknown: {HELP}"

    def ask(self, text: str) -> None:
        """Print the answer as it comes; a question without an answer is forgotten.

        Ctrl-C stops the answer and keeps what has come. Raises ApiError.
        """
        system = [{"role": "system", "content": self.system}] if self.system else []
        question = {"role": "user", "content": text}
        body = {**self._body, "messages": [*system, *self.messages, question]}
        parts: list[str] = []
        try:
            with closing(self._events(body)) as deltas:
                for delta in deltas:
                    parts.append(delta)
                    print(delta, end="", file=self._out, flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="", file=self._out)
        finally:
            if parts:
                print(file=self._out, flush=True)
        if parts:
            self.messages += [question, {"role": "assistant", "content": "".join(parts)}]

    def _events(self, body: dict[str, Any]) -> Generator[str, None, None]:
        with closing(self._client.stream("/v1/chat/completions", body)) as events:
            for event in events:
                for choice in event.get("choices", ()):
                    if text := choice.get("delta", {}).get("content"):
                        yield text


def talk(conversation: Conversation, lines: Iterable[str], out: TextIO) -> int:
    """Answer each line or obey it; the exit code says whether the last answer came."""
    code = 0
    for line in lines:
        word, _, rest = line.strip().partition(" ")
        if not word:
            continue
        if word in ("/exit", "/quit"):
            break
        if word.startswith("/"):
            print(conversation.obey(word, rest.strip()), file=out)
        else:
            try:
                conversation.ask(line)
                code = 0
            except ApiError as error:
                print(f"error: {error}", file=sys.stderr)
                code = 1
    return code
