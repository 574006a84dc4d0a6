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
    ContentPart,
    RequestedSampling,
    TextPart,
    ToolCallPart,
    calls_of,
    reasoning_of,
    text_of,
)
from pdserve.text.parsing import ContentParser
from pdserve.text.tokenizer import ChoiceText, StopMatcher, TextUpdate, Vocabulary

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
    format: AnswerFormat = field(default_factory=AnswerFormat)
    continues: bool = True  # the answer continues the prompt's text


@dataclass(slots=True)
class _Output:
    text: ChoiceText
    parser: ContentParser | None
    deltas: list[OutputDelta] = field(default_factory=list)
    withheld: OutputDelta | None = None  # tokens whose text is not complete yet
    finish: str | None = None
    calls: bool = False
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
        if self.finish is not None:
            call_parts += calls_of(self.call)
            self.call = []
        return tuple(ToolCall(part.id, part.name, part.arguments) for part in call_parts)


class Generation:
    """Collect the events of one generating request until `done`."""

    def __init__(self, prepared: PreparedRequest, vocabulary: Vocabulary) -> None:
        self.done = False
        self._prepared = prepared
        self._vocabulary = vocabulary
        self._outputs = [self._output() for _ in range(prepared.sampling.n)]
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._cached_tokens = 0
        self._stopped: list[int] = []

    def _output(self) -> _Output:
        sampling, answer_format = self._prepared.sampling, self._prepared.format
        detokenizer = self._vocabulary.incremental(
            skip_special_tokens=sampling.skip_special_tokens,
            keep=answer_format.special,
            continues=self._prepared.continues,
        )
        stops = StopMatcher(
            sampling.stop, include_stop_str=sampling.include_stop, min_tokens=sampling.min_tokens
        )
        stop_ids = {*self._vocabulary.model_info.eos_ids, *sampling.stop_token_ids}
        text = ChoiceText(detokenizer, stops, stop_ids=stop_ids, include_stop=sampling.include_stop)
        return _Output(text, answer_format.parser())

    def take(self, event: RequestEvent) -> OutputDelta | None:
        """Process an event; return the new delta, if any. Raises GenerationError, or the error with
        which the engine rejects the request."""
        match event:
            case NewTokens() if self._outputs[event.choice].finish is None:
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
        update = output.text.push(event.ids, _FINISH.get(event.finish))
        count = len(update.offsets)
        if update.finish is not None and event.finish is None:
            self._stopped.append(event.choice)
        content = _parsed(output, update)
        output.finish = update.finish
        output.calls |= any(isinstance(part, ToolCallPart) for part in content)
        if update.finish == "stop" and output.calls:
            is_cut = any(isinstance(part, ToolCallPart) and part.cut for part in content)
            output.finish = "length" if is_cut else "tool_calls"
        calls = output.take_complete_calls(content)
        ids = event.ids[:count]
        scores = zip(ids, event.logprobs, strict=False)
        delta = OutputDelta(
            event.choice,
            text_of(content),
            reasoning_of(content),
            calls,
            ids,
            tuple(self._scored(token, score) for token, score in scores),
            output.finish,
            self._stop_reason(update, ids),
        )
        if output.withheld is not None:
            delta = replace(
                delta,
                token_ids=output.withheld.token_ids + delta.token_ids,
                logprobs=output.withheld.logprobs + delta.logprobs,
            )
        if not (content or output.finish):
            output.withheld = delta
            return None
        output.withheld = None
        output.deltas.append(delta)
        return delta

    def _stop_reason(self, update: TextUpdate, ids: Sequence[int]) -> str | int | None:
        if update.stop is not None or update.finish != "stop" or not ids:
            return update.stop
        return ids[-1] if ids[-1] in self._prepared.sampling.stop_token_ids else None

    def _scored(self, token: int, score: TokenLogprob) -> Logprobs:
        logprobs = {token: score.logprob, **dict(score.top)}
        return {i: Logprob(value, self._vocabulary.token_text(i)) for i, value in logprobs.items()}

    def take_stopped(self) -> tuple[int, ...]:
        """Return outputs that a stop string ended since the last call; the caller aborts them."""
        stopped, self._stopped = tuple(self._stopped), []
        return stopped

    def result(self) -> RequestOutput:
        """Return the complete answer. Call it only once `done`."""
        ids = self._prepared.request.prompt_ids
        scores = None
        if self._prepared.request.params.prompt_logprobs is not None:
            scored = zip(ids[1:], self._prompt_logprobs, strict=False)
            scores = (None, *(self._scored(token, score) for token, score in scored))
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
            output.finish or "stop",
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


def _parsed(output: _Output, update: TextUpdate) -> list[ContentPart]:
    if output.parser is None:
        return [TextPart(update.text)] if update.text else []
    content = output.parser.push(update.text) if update.text else []
    if update.finish is not None:
        is_cut = update.finish == "length" or update.stop is not None
        content = [*content, *output.parser.finish(cut=is_cut)]
    return content


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
