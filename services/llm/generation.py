"""One request of the in-process LLM: engine events in, text out; no threads, no clock.

Invariant: a choice gives nothing after the delta that carries its finish reason.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from pdserve.engine.api.errors import InvalidRequest
from pdserve.engine.api.request import (
    Event,
    Finished,
    FinishReason,
    NewTokens,
    PromptScored,
    RequestFailed,
    TokenLogprob,
)
from pdserve.gateway.text.choice_text import ChoiceText
from pdserve.gateway.text.stop import StopMatcher
from pdserve.gateway.text.tokenizer import Tokenizer

_FINISH: dict[FinishReason | None, str] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


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
    text: ChoiceText
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
        stop_ids: Collection[int],
        continues: bool,
    ) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.done = False
        self._choices = [
            _Choice(
                ChoiceText(
                    tokenizer.incremental(continues=continues),
                    StopMatcher(stop, min_tokens=min_tokens),
                    stop_ids=stop_ids,
                )
            )
            for _ in range(num_choices)
        ]
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._cached_tokens = 0
        self._stopped: list[int] = []

    def take(self, event: Event) -> TextDelta | None:
        """New text, if the event brings any. Raises GenerationError, and InvalidRequest for a
        parameter that cannot be followed."""
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
                if event.param:
                    raise InvalidRequest(event.message, event.param)
                raise GenerationError(event.message)
        return None

    def _tokens(self, event: NewTokens) -> TextDelta:
        choice = self._choices[event.choice]
        update = choice.text.push(event.ids, _FINISH.get(event.finish))
        count = len(update.offsets)
        choice.ids += event.ids[:count]
        choice.logprobs += event.logprobs[:count]
        choice.texts.append(update.text)
        choice.finish = update.finish
        if update.finish is not None and event.finish is None:
            self._stopped.append(event.choice)
        return TextDelta(event.choice, update.text, update.finish)

    def take_stopped(self) -> tuple[int, ...]:
        """Choices that a stop string has ended since the last call; the engine has to be told."""
        stopped, self._stopped = tuple(self._stopped), []
        return stopped

    def result(self) -> Result:
        """What was generated; call it once `done`."""
        return Result(
            self.prompt_ids,
            tuple(
                Completion("".join(c.texts), tuple(c.ids), c.finish or "stop", tuple(c.logprobs))
                for c in self._choices
            ),
            self._cached_tokens,
            self._prompt_logprobs,
        )
