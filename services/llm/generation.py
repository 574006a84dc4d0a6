"""One request of the in-process LLM: engine events in, text out; no threads, no clock.

Invariant: a choice gives nothing after the delta that carries its finish reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.engine.api.request import (
    Event,
    Finished,
    FinishReason,
    NewTokens,
    PromptScored,
    RequestFailed,
    TokenLogprob,
)
from pdserve.gateway.text.stop import StopMatcher
from pdserve.gateway.text.tokenizer import Tokenizer


class GenerationError(Exception):
    """The engine gave a request up."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one choice; `finish_reason` ("stop" or "length") comes with its last."""

    choice: int
    text: str
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished choice. `token_ids` end with the token that ended it."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] = ()  # empty, or one per token


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one prompt, with `params.n` completions."""

    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    cached_tokens: int  # prompt tokens whose KV was there already
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of prompt_ids[1:], if asked for

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.completions[0].text


@dataclass(slots=True)
class _Choice:
    stops: StopMatcher
    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None


class Generation:
    """Collects the events of one request until `done`."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        num_choices: int,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        min_tokens: int,
        *,
        continues: bool,
    ) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.done = False
        self._choices = [
            _Choice(StopMatcher(stop, min_tokens=min_tokens)) for _ in range(num_choices)
        ]
        self._texts = [tokenizer.incremental(continues=continues) for _ in range(num_choices)]
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._cached_tokens = 0
        self._stopped: list[int] = []

    def take(self, event: Event) -> TextDelta | None:
        """New text, if the event brings any. Raises GenerationError."""
        match event:
            case NewTokens() if self._choices[event.choice].finish is None:
                return self._tokens(event)
            case PromptScored():
                self._prompt_logprobs = event.logprobs
            case Finished():
                self._cached_tokens = event.cached_tokens
                self.done = True
            case RequestFailed():
                self.done = True
                raise GenerationError(event.message)
        return None

    def _tokens(self, event: NewTokens) -> TextDelta:
        choice = self._choices[event.choice]
        text, before = self._texts[event.choice], len(choice.texts)
        for position, token in enumerate(event.ids):
            choice.ids.append(token)
            choice.logprobs += event.logprobs[position : position + 1]
            ends = event.finish is FinishReason.STOP and position == len(event.ids) - 1
            emitted = choice.stops.push("" if ends else text.push([token]))
            choice.texts.append(emitted.text)
            if emitted.stop is not None:
                choice.finish = "stop"
                if event.finish is None:
                    self._stopped.append(event.choice)
                break
        if choice.finish is None and event.finish is not None:
            rest = choice.stops.flush(text.flush())
            choice.texts.append(rest.text)
            stopped = event.finish is FinishReason.STOP or rest.stop is not None
            choice.finish = "stop" if stopped else "length"
        return TextDelta(event.choice, "".join(choice.texts[before:]), choice.finish)

    def take_stopped(self) -> tuple[int, ...]:
        """Choices that a stop string has ended since last asked: the engine goes on with them."""
        stopped, self._stopped = tuple(self._stopped), []
        return stopped

    def result(self) -> Result:
        """Once `done`."""
        return Result(
            self.prompt_ids,
            tuple(
                Completion("".join(c.texts), tuple(c.ids), c.finish or "stop", tuple(c.logprobs))
                for c in self._choices
            ),
            self._cached_tokens,
            self._prompt_logprobs,
        )
