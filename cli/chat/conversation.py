"""A conversation with a server's model. The history is kept here; the server keeps none."""

from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any, Protocol

from pdserve.cli.http_client import ApiClient, ApiError
from pdserve.cli.options import ChatSettings

CHAT = "/v1/chat/completions"


class AnswerView(Protocol):
    """Displays one response at a time, as it arrives."""

    def think(self, text: str) -> None: ...
    def write(self, text: str) -> None: ...
    def end(self, note: str = "") -> None: ...


class Conversation:
    """The messages so far, and the params of the next request."""

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
        self.question = ""  # the last question, with or without a response
        self.reasoning = ""  # of the last response
        self._previous_messages = self.messages  # messages before the last question

    @property
    def sampling(self) -> str:
        """The sampling params in force, as text."""
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
        """Forget the messages; the last question can still be retried."""
        self.messages = self._previous_messages = []

    def ask(self, text: str, view: AnswerView) -> bool:
        """Send a question and show the response as it arrives; a question without a response is not
        kept as a message.

        Returns False if Ctrl-C stopped the response, of which the text so far is kept. Raises
        ApiError.
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
        """Send the last question again, like `ask`; without a new response the old one stays."""
        saved_messages, self.messages = self.messages, self._previous_messages
        try:
            return self.ask(self.question, view)
        finally:
            if self.messages is self._previous_messages:
                self.messages = saved_messages

    def _take(
        self, event: dict[str, Any], parts: list[str], thoughts: list[str], view: AnswerView
    ) -> str:
        """Show an event; return a note if the response was cut off."""
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
                limit_text = (
                    f"after {self.max_tokens} tokens by --max-tokens" if self.max_tokens else ""
                )
                note = f"[truncated {limit_text or 'at the token limit of the server'}]"
        usage = event.get("usage") or {}
        total_tokens, completion_tokens = (
            usage.get("total_tokens", 0),
            usage.get("completion_tokens", 0),
        )
        if (
            total_tokens
            and total_tokens >= self.context_len > 0
            and completion_tokens != self.max_tokens
        ):
            note = f"[the context of {self.context_len} tokens is full; /reset clears it]"
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
    """The /v1/models entry of that name, or the first entry if the name is empty. Raises ApiError
    if there is none."""
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
