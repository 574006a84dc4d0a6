"""One request of the Python API: engine events in, outputs out; no threads, no clock.

Invariant: an output yields no delta after the one that carries its finish reason.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pdserve.engine.api import (
    EngineError,
    Event,
    Finished,
    FinishReason,
    InvalidRequest,
    NewTokens,
    Pooled,
    PromptScored,
    Request,
    RequestFailed,
    TokenLogprob,
)
from pdserve.llm.outputs import (
    CompletionOutput,
    GenerationError,
    Logprob,
    Logprobs,
    OutputDelta,
    RequestOutput,
    ToolCall,
)
from pdserve.text import (
    AnswerFormat,
    Choice,
    ContentPart,
    RequestedSampling,
    ScoredToken,
    ToolCallPart,
    calls_of,
    reasoning_of,
    scored,
    text_of,
)
from pdserve.text.tokenizer import Vocabulary

_FINISH: dict[FinishReason | None, str] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class SubmitRefused:
    """The only event of a request that the engine rejects at submission."""

    key: str
    error: Exception


RequestEvent = Event | SubmitRefused


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """An engine request with what is needed to turn its tokens into an answer."""

    request: Request
    prompt: str | None  # the prompt's text; None if the prompt is token ids
    sampling: RequestedSampling
    format: AnswerFormat
    continues: bool  # the answer continues the prompt's text


@dataclass(slots=True)
class _Output:
    choice: Choice
    deltas: list[OutputDelta] = field(default_factory=list)
    withheld: OutputDelta | None = None  # tokens whose text is not complete yet
    call: list[ToolCallPart] = field(default_factory=list)  # parts of the unfinished tool call

    def take_complete_calls(self, content: Sequence[ContentPart]) -> tuple[ToolCall, ...]:
        """Return the tool calls that `content` completes or that the answer's end cuts off."""
        call_parts: list[ToolCallPart] = []
        for part in content:
            if self.call and (not isinstance(part, ToolCallPart) or part.id):
                call_parts += calls_of(self.call)
                self.call = []
            if isinstance(part, ToolCallPart):
                self.call.append(part)
        if self.choice.closed:
            call_parts += calls_of(self.call)
            self.call = []
        return tuple(ToolCall(part.id, part.name, part.arguments) for part in call_parts)


class Generation:
    """Collect the events of one generating request until `done`."""

    def __init__(self, prepared: PreparedRequest, vocabulary: Vocabulary) -> None:
        self.done = False
        self._prepared = prepared
        self._vocabulary = vocabulary
        self._outputs = [self._output(index) for index in range(prepared.sampling.n)]
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._cached_tokens = 0
        self._stopped: list[int] = []

    def _output(self, index: int) -> _Output:
        prepared = self._prepared
        choice = Choice(
            index,
            self._vocabulary,
            prepared.sampling,
            continues=prepared.continues,
            parser=prepared.format.parser(),
            keep=prepared.format.special,
        )
        return _Output(choice)

    def take(self, event: RequestEvent) -> OutputDelta | None:
        """Process an event; return the new delta, if any. Raises GenerationError, or the error with
        which the engine rejects the request."""
        match event:
            case NewTokens() if not self._outputs[event.choice].choice.closed:
                return self._tokens(event)
            case PromptScored():
                self._prompt_logprobs = event.logprobs
            case Finished():
                self._cached_tokens = event.cached_tokens
                self.done = True
            case RequestFailed() | SubmitRefused():
                self.done = True
                raise failure(event, self._prepared.sampling)
        return None

    def _tokens(self, event: NewTokens) -> OutputDelta | None:
        output = self._outputs[event.choice]
        new = output.choice.push(event.ids, _FINISH.get(event.finish), event.logprobs)
        if new.finish is not None and event.finish is None:
            self._stopped.append(event.choice)
        delta = OutputDelta(
            event.choice,
            text_of(new.content),
            reasoning_of(new.content),
            output.take_complete_calls(new.content),
            new.ids,
            tuple(map(_logprobs, new.tokens)),
            new.finish,
            new.stop_reason,
        )
        if output.withheld is not None:
            delta = replace(
                delta,
                token_ids=output.withheld.token_ids + delta.token_ids,
                logprobs=output.withheld.logprobs + delta.logprobs,
            )
        if not (new.content or new.finish):
            output.withheld = delta
            return None
        output.withheld = None
        output.deltas.append(delta)
        return delta

    def take_stopped(self) -> tuple[int, ...]:
        """Return outputs that a stop string ended since the last call; the caller aborts them."""
        stopped, self._stopped = tuple(self._stopped), []
        return stopped

    def result(self) -> RequestOutput:
        """Return the complete answer. Call it only once `done`."""
        ids = self._prepared.request.prompt_ids
        scores = None
        if self._prepared.sampling.prompt_logprobs is not None:
            pairs = zip(ids[1:], self._prompt_logprobs, strict=False)
            tokens = (scored(self._vocabulary, token, score, 0) for token, score in pairs)
            scores = (None, *map(_logprobs, tokens))
        outputs = tuple(self._joined(i, output) for i, output in enumerate(self._outputs))
        return RequestOutput(self._prepared.prompt, ids, outputs, self._cached_tokens, scores)

    def _joined(self, index: int, output: _Output) -> CompletionOutput:
        deltas = output.deltas
        ids = tuple(token for delta in deltas for token in delta.token_ids)
        logprobs = None
        if self._prepared.sampling.logprobs is not None:
            logprobs = tuple(
                token_logprobs for delta in deltas for token_logprobs in delta.logprobs
            )
        return CompletionOutput(
            index,
            "".join(delta.text for delta in deltas),
            ids,
            deltas[-1].finish_reason or "stop" if deltas else "stop",
            deltas[-1].stop_reason if deltas else None,
            "".join(delta.reasoning for delta in deltas),
            tuple(call for delta in deltas for call in delta.tool_calls),
            logprobs,
            None
            if logprobs is None
            else math.fsum(
                token_logprobs[i].logprob for token_logprobs, i in zip(logprobs, ids, strict=True)
            ),
        )


def _logprobs(token: ScoredToken) -> Logprobs:
    entries = (token.chosen, *token.top)
    return {e.id: Logprob(e.logprob, e.text) for e in entries if e.logprob is not None}


def failure(
    event: RequestFailed | SubmitRefused, sampling: RequestedSampling | None = None
) -> Exception:
    """Return the exception for a failed request; `param` is the field name that the user wrote."""
    if isinstance(event, RequestFailed):
        if not event.param:
            return GenerationError(event.message)
        error: Exception = InvalidRequest(event.message, event.param)
    else:
        error = event.error
    if isinstance(error, EngineError) and sampling is not None:
        error.param = sampling.written_as(error.param)
    return error


class Embedding:
    """Collect the events of one embedding request until `done`."""

    def __init__(self, *, normalizes: bool) -> None:
        self.done = False
        self._normalizes = normalizes
        self._values: Sequence[float] = ()

    def take(self, event: RequestEvent) -> None:
        """Process an event. Raises GenerationError, or the engine's error for the request."""
        match event:
            case Pooled():
                self._values = event.values
            case Finished():
                self.done = True
            case RequestFailed() | SubmitRefused():
                self.done = True
                raise failure(event)

    def take_stopped(self) -> tuple[int, ...]:
        return ()

    def result(self) -> list[float]:
        """Return the vector, scaled to length 1 if the model normalizes."""
        length = math.hypot(*self._values) if self._normalizes else 1.0
        return [value / length for value in self._values] if length else list(self._values)
