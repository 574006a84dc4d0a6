"""Streamed completions of a real system, and their results."""

from dataclasses import dataclass, field
from typing import Any

import openai

WORDS = "one two three four five six seven eight nine ten eleven twelve "
LONG = "Far too long to be computed where it is answered: " + WORDS * 130  # about 1,700 tokens


@dataclass
class Stream:
    """One request and its result, by choice."""

    options: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)  # fields that OpenAI's API does not have
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    num_chunks: int = 0
    usage: Any = None
    error: str = ""

    def run(self, api: openai.OpenAI, model: str) -> None:
        extra = {"ignore_eos": True, **self.extra}
        try:
            for chunk in api.completions.create(
                model=model,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=extra,
                **self.options,
            ):
                self.num_chunks += 1
                self.usage = chunk.usage or self.usage
                for choice in chunk.choices:
                    self._take(choice)
        except openai.OpenAIError as error:
            self.error = repr(error)

    def _take(self, choice: Any) -> None:
        self.text[choice.index] = self.text.get(choice.index, "") + choice.text
        if choice.logprobs is not None:
            scores = self.logprobs.setdefault(choice.index, [])
            scores += choice.logprobs.token_logprobs
        if choice.finish_reason:
            self.ends[choice.index] = choice.finish_reason

    @property
    def answer(self) -> tuple[Any, ...]:
        tokens = self.usage.completion_tokens if self.usage else None
        return self.text, self.logprobs, self.ends, tokens
