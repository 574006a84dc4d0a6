"""A conversation with a server's model. The history lives here; the server keeps none."""

from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any, Protocol

from pdserve.services.cli.http_client import ApiClient, ApiError
from pdserve.services.options.settings import ChatSettings

CHAT = "/v1/chat/completions"


class AnswerView(Protocol):
    """A view is told of one answer at a time, as it comes."""

    def think(self, text: str) -> None: ...
    def write(self, text: str) -> None: ...
    def end(self, note: str = "") -> None: ...


class Conversation:
    """Messages so far, and how the next one is asked for."""

    def __init__(self, client: ApiClient, model: Mapping[str, Any], settings: ChatSettings) -> None:
        """`model` is an entry of /v1/models."""
        self.client = client
        self.model = str(model["id"])
        self.context_len = int(model.get("max_model_len") or 0)
        self.recommended: dict[str, float] | None = model.get("default_sampling_params")
        self.temperature = settings.temperature if settings.temperature >= 0 else None
        self.max_tokens = settings.max_tokens
        self.system = settings.system
        self.messages: list[dict[str, str]] = []
        self.question = ""  # the last one, answered or not
        self.reasoning = ""  # of the last answer
        self._before = self.messages  # those before the last question

    @property
    def sampling(self) -> str:
        """What is in force, in words."""
        recommended = dict(self.recommended or {})
        if self.temperature is not None:
            recommended.pop("temperature", None)
        own = [] if self.temperature is None else [f"temperature {self.temperature:g} (yours)"]
        if self.recommended is None:
            return ", ".join(own) or "sampling as the server chooses"
        parts = [f"{name} {value:g}" for name, value in recommended.items()]
        if parts:
            own.append(f"{', '.join(parts)} (recommended for this model)")
        return ", ".join(own) or "temperature 1 (nothing else is recommended for this model)"

    def reset(self) -> None:
        """Forgets the messages; the last question can still be asked again."""
        self.messages = self._before = []

    def ask(self, text: str, view: AnswerView) -> bool:
        """Shows the answer as it comes; a question without an answer is no message.

        False if Ctrl-C has stopped the answer; what has come is kept. Raises ApiError.
        """
        self.question = text
        self._before = self.messages
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
        """Asks the last question again; without a new answer its old one stays. As `ask`."""
        kept, self.messages = self.messages, self._before
        try:
            return self.ask(self.question, view)
        finally:
            if self.messages is self._before:
                self.messages = kept

    def _take(
        self, event: dict[str, Any], parts: list[str], thoughts: list[str], view: AnswerView
    ) -> str:
        """Shows what an event brings; a note if the answer was cut."""
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
                cut_by = f"after {self.max_tokens} tokens: --max-tokens" if self.max_tokens else ""
                note = f"[cut {cut_by or 'by the server, which allows no more tokens'}]"
        usage = event.get("usage") or {}
        used, new = usage.get("total_tokens", 0), usage.get("completion_tokens", 0)
        if used and used >= self.context_len > 0 and new != self.max_tokens:
            note = f"[the context of {self.context_len} tokens is full: /reset forgets it]"
        return note

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
    """The model of that name as /v1/models has it, or the first if the name is empty. Raises
    ApiError."""
    models = client.models()
    if not models:
        raise ApiError(f"{client.url} serves no model yet", 503)
    found = [model for model in models if not name or model["id"] == name]
    if not found:
        names = ", ".join(model["id"] for model in models)
        raise ApiError(
            f"{client.url} does not serve {name!r} but {names}: choose with --model", 404
        )
    return found[0]
