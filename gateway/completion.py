"""Runs a prepared completion and turns its tokens into an answer, for every API.

Most tokens yield only text. If the client has taken everything before, that text goes to the client
in the call that brings the token.

Ownership: a stream owns its requests at the router; closing it early cancels them at once.
Each completion ends with exactly one Usage, or raises one ServiceError.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from pdserve.gateway.prepared_completion import PreparedCompletion, Usage, WriteText
from pdserve.gateway.router_client import Upstream, merge
from pdserve.gateway.sampling import check_logprobs, from_wire
from pdserve.protos.common_pb2 import (
    ABORTED,
    CANCELLED,
    INTERNAL,
    LENGTH,
    STOP,
    Finished,
    FinishReason,
    Start,
    TokenLogprob,
    Tokens,
)
from pdserve.protos.router_pb2 import RequestEvent
from pdserve.services.common.errors import ServiceError
from pdserve.text import (
    Choice,
    ContentPart,
    Delta,
    ScoredToken,
    TextPart,
    only_text,
    scored,
    seed_of,
)
from pdserve.text.tokenizer import Vocabulary

AT_ONCE = 8  # prompt tokens described before other tasks run
_FINISH: dict[FinishReason, str] = {STOP: "stop", LENGTH: "length"}
END_EVENTS_S = 2.0  # for the router to end a request whose choices have all ended here
T = TypeVar("T")


class PromptRun:
    """The run of one prompt of a completion."""

    def __init__(
        self,
        upstream: Upstream,
        completion: PreparedCompletion,
        index: int,
        now: float,
        write: WriteText | None,
    ) -> None:
        self._upstream = upstream
        self._write = write
        self._completion = completion
        self._prompt = completion.prompts[index]
        self._request = (
            completion.id if len(completion.prompts) == 1 else f"{completion.id}-{index}"
        )
        self._now = now
        width = max(1, self._prompt.params.n)
        self._choices = [
            Choice(
                index * width + c,
                completion.model.text.vocabulary,
                completion.sampling,
                continues=completion.continues,
                offset=len(self._prompt.text) if completion.echo else 0,
                parser=completion.format.parser(),
                keep=completion.format.special,
            )
            for c in range(width)
        ]
        self._num_open = width  # choices that have not ended
        self._to_echo = set(range(width)) if completion.echo else set()
        # The prompt's tokens as every choice echoes them, once described.
        self._echoed: tuple[ScoredToken, ...] | None = None if completion.echo else ()
        self._withheld: dict[int, tuple[int, ...]] = {}  # ids without text so far, by choice
        # Kept as messages, which take a fraction of the memory of converted ones.
        self.prompt_scores: list[TokenLogprob] = []
        self._finished = Finished()

    def usage(self) -> Usage:
        counted = sum(choice.num_tokens for choice in self._choices)
        return Usage(
            len(self._prompt.ids),
            0 if self._completion.echo_only else counted,
            self._finished.cached_tokens,
            self._finished.inexact,
            sum(choice.reasoning_tokens for choice in self._choices),
        )

    def best(self, n: int) -> list[Choice]:
        """Return the n choices with the highest mean log-probability, or all in order."""
        if n >= len(self._choices):
            return self._choices
        return sorted(
            self._choices, key=lambda c: c.total_logprob / max(1, c.num_tokens), reverse=True
        )[:n]

    async def events(self) -> AsyncGenerator[Delta, None]:
        take_token = None if self._completion.echo else self._take_token
        async with aclosing(self._upstream.open(self._start(), take_token)) as items:
            async for item in items:
                if isinstance(item, RequestEvent) and not item.HasField("tokens"):
                    self._note(item)
                    continue
                if isinstance(item, Delta):
                    yield item
                else:
                    if self._echoed is None and self._completion.sampling.logprobs is not None:
                        self._echoed = await self._scored_prompt()
                    delta = self._push(item.tokens)
                    if delta is not None:
                        yield delta
                if not self._num_open:
                    break
            for item in await _last(items):
                if isinstance(item, RequestEvent):
                    self._note(item)
        if self._num_open:
            raise ServiceError(INTERNAL, "the answer ended before it was complete")
        counts = {choice.index: choice.num_tokens for choice in self._choices}
        self._completion.meter.finished(self._finished, counts)

    def _note(self, event: RequestEvent) -> None:
        """Record an event without tokens. Raises ServiceError if the request failed."""
        kind = event.WhichOneof("event")
        if kind == "prompt_logprobs":
            self.prompt_scores.extend(event.prompt_logprobs.logprobs)
        elif kind == "placed":
            self._completion.meter.placed(event.placed)
        elif kind == "finished":
            self._finished = event.finished
        elif kind == "failed":
            failure = event.failed.failure
            if failure.code == CANCELLED and not self._num_open:
                return
            failure.param = self._completion.sampling.written_as(failure.param)
            raise ServiceError.from_failure(failure)

    def _start(self) -> Start:
        completion = self._completion
        elapsed = self._now - completion.meter.arrived
        return Start(
            request=self._request,
            model=completion.model.card.name,
            cache_salt=completion.cache_salt,
            priority=completion.priority,
            tenant=completion.tenant,
            prompt_ids=self._prompt.ids,
            tokenizer=completion.model.card.kv_identity.tokenizer,
            params=self._prompt.params,
            trace_parent=completion.meter.span.context.parent,
            trace_state=completion.meter.span.context.state,
            remaining_ms=max(1, int((completion.timeout_s - elapsed) * 1000)),
            queue_remaining_ms=max(1, int((completion.queue_timeout_s - elapsed) * 1000)),
            seed=seed_of(completion.sampling),
        )

    def _take_token(self, number: int, id_: int) -> Delta | None:
        """Take the next token of a choice; return its delta, None if there is nothing to send."""
        choice = self._choices[number]
        if choice.closed:
            return None
        text = None if self._write is None or self._withheld else choice.push_text(id_)
        if text is None:  # the token may yield more
            delta = self._counted(number, choice.push((id_,), None), 1, ended=False)
            if delta is None or self._write is None:
                return delta
            text = only_text(delta)
            return None if text and self._write(delta.choice, text) else delta
        self._count(choice.index, 1)
        if not text:
            self._withheld[number] = (id_,)
            return None
        written = self._write is not None and self._write(choice.index, text)
        return None if written else choice.text_delta(text, id_)

    def _push(self, tokens: Tokens) -> Delta | None:
        choice = self._choices[tokens.choice]
        if choice.closed:
            return None
        if tokens.finish == ABORTED:
            raise ServiceError(INTERNAL, "the answer ended before it was complete")
        scores = [from_wire(score) for score in tokens.logprobs]
        delta = choice.push(tokens.ids, _FINISH.get(tokens.finish), scores)
        return self._counted(tokens.choice, delta, len(tokens.ids), ended=bool(tokens.finish))

    def _counted(self, number: int, delta: Delta, num_ids: int, *, ended: bool) -> Delta | None:
        """Count new tokens of a choice; return its delta to send. `ended`: decode ended it."""
        self._count(delta.choice, num_ids)
        if delta.finish is not None:
            self._num_open -= 1
            self._completion.meter.ended(delta.finish)
            if not ended:  # a stop string ended it, and decode does not know yet
                self._upstream.cancel(self._request, [number])
        if number in self._to_echo:
            self._to_echo.remove(number)
            delta = self._echo(delta)
        if not (delta.content or delta.tokens or delta.finish):
            self._withheld[number] = self._withheld.get(number, ()) + delta.ids
            return None
        if self._withheld:
            delta = delta._replace(ids=self._withheld.pop(number, ()) + delta.ids)
        return delta

    def _count(self, choice: int, num_ids: int) -> None:
        self._completion.admitted.first_token()
        self._completion.meter.tokens(choice, num_ids)

    async def _scored_prompt(self) -> tuple[ScoredToken, ...]:
        vocabulary = self._completion.model.text.vocabulary
        num_top = self._completion.sampling.logprobs or 0
        return await score_prompt(vocabulary, self._prompt.ids, self.prompt_scores, num_top)

    def _echo(self, delta: Delta) -> Delta:
        """Return the first delta of a choice, with the prompt before it."""
        prompt = TextPart(self._prompt.text)
        scores = self._echoed or ()
        if self._completion.echo_only:
            return Delta(delta.choice, (prompt,), scores, 0, "length")
        return delta._replace(content=(prompt, *delta.content), tokens=scores + delta.tokens)


async def score_prompt(
    vocabulary: Vocabulary, ids: Sequence[int], scores: Sequence[TokenLogprob], num_top: int
) -> tuple[ScoredToken, ...]:
    """Return the tokens of an echoed prompt, each with the `num_top` best. `scores` belong to
    ids[1:]. Other tasks run after every AT_ONCE tokens."""
    result = []
    offset = 0
    text = vocabulary.incremental(skip_special_tokens=False)
    for index, (token, score) in enumerate(zip(ids, [None, *scores], strict=True)):
        if index % AT_ONCE == 0:
            await asyncio.sleep(0)
        logprobs = None if score is None else from_wire(score)
        token_scores = scored(vocabulary, token, logprobs, offset)
        result.append(replace(token_scores, top=token_scores.top[:num_top]))
        offset += len(text.push([token]))
    return tuple(result)


async def _last(events: AsyncIterator[T]) -> list[T]:
    """Return the router's remaining events for a request whose choices have all ended here; empty
    if they do not come within END_EVENTS_S."""
    try:
        async with asyncio.timeout(END_EVENTS_S):
            return [event async for event in events]
    except TimeoutError:
        return []


class Scores(Protocol):
    """Holder of the scored tokens of a whole choice."""

    async def add(self, tokens: Sequence[ScoredToken]) -> None: ...


S = TypeVar("S", bound=Scores)


@dataclass(slots=True)
class CompletionResult(Generic[S]):
    """One whole choice."""

    index: int
    scores: S
    content: list[ContentPart] = field(default_factory=list)
    num_tokens: int = 0
    finish: str = ""
    stop: str | int | None = None  # what ended the choice, as in Delta.stop_reason
    ids: list[int] = field(default_factory=list)  # of the generated tokens
    prompt_scores: Sequence[TokenLogprob] = ()  # of the prompt's tokens after the first

    async def add(self, delta: Delta) -> None:
        self.content += delta.content
        await self.scores.add(delta.tokens)
        self.ids += delta.ids
        self.num_tokens = delta.num_tokens
        if delta.finish is not None:
            self.finish, self.stop = delta.finish, delta.stop_reason


class HeldLogprobs:
    """Counter of the log-probabilities that an answer holds until it is complete."""

    def __init__(self, completion: PreparedCompletion, instead: str = "a stream, or ") -> None:
        """`instead`: what else a client may request, for the error text. Raises ServiceError if
        max_tokens allows too many; without max_tokens, `add` checks them as they come."""
        self._sampling = completion.sampling
        self._instead = instead
        self._num_tokens = 0
        params = [prompt.params for prompt in completion.prompts]
        max_tokens = sum(max(1, param.n) * param.max_tokens for param in params)
        check_logprobs(self._sampling, max_tokens, instead)

    def add(self, delta: Delta) -> None:
        """Count a delta. Raises ServiceError if there are too many log-probabilities."""
        self._num_tokens += len(delta.ids)
        check_logprobs(self._sampling, self._num_tokens, self._instead)


class Completions:
    """Runner of completions, as a stream of deltas or whole."""

    def __init__(self, upstream: Upstream, clock: Callable[[], float]) -> None:
        self._upstream = upstream
        self._clock = clock

    def stream(
        self, completion: PreparedCompletion, write: WriteText | None = None
    ) -> AsyncGenerator[Delta | Usage, None]:
        """Yield the deltas of all choices as they come, then the Usage. Leaves out deltas that
        `write` sends; `write` is called only when the consumer has handled all earlier ones. Raises
        ServiceError."""
        if completion.tool_loop is not None:
            return completion.tool_loop.stream(completion, self._run)
        return self._run(completion, write)

    async def _run(
        self, completion: PreparedCompletion, write: WriteText | None = None
    ) -> AsyncGenerator[Delta | Usage, None]:
        runs = self._runs(completion, write)
        async with aclosing(merge([run.events() for run in runs])) as events:
            async for delta in events:
                yield delta
        yield sum((run.usage() for run in runs), Usage(0, 0, 0))

    def _runs(
        self, completion: PreparedCompletion, write: WriteText | None = None
    ) -> list["PromptRun"]:
        now = self._clock()
        alone = len(completion.prompts) == 1  # several prompts' deltas wait for each other (merge)
        return [
            PromptRun(self._upstream, completion, index, now, write if alone else None)
            for index in range(len(completion.prompts))
        ]

    async def collect(
        self, completion: PreparedCompletion, scores: Callable[[], S]
    ) -> tuple[list[CompletionResult[S]], Usage]:
        """Return whole choices, each with its own `scores`, and the Usage. Keeps the n of best_of
        candidates with the best mean log-probability. Raises ServiceError."""
        logprobs = HeldLogprobs(completion)
        if completion.tool_loop is not None:
            return await self._collect_rounds(completion, scores, logprobs)
        runs = self._runs(completion)
        answers: dict[int, CompletionResult[S]] = {}
        async with aclosing(merge([run.events() for run in runs])) as events:
            async for delta in events:
                logprobs.add(delta)
                if delta.choice not in answers:
                    answers[delta.choice] = CompletionResult(delta.choice, scores())
                await answers[delta.choice].add(delta)
        results: list[CompletionResult[S]] = []
        for run in runs:
            for choice in run.best(completion.sampling.n):
                answer = answers[choice.index]
                answer.index = len(results)
                answer.prompt_scores = run.prompt_scores
                results.append(answer)
        completion_tokens = sum(answer.num_tokens for answer in results)
        total = sum((run.usage() for run in runs), Usage(0, 0, 0))
        return results, replace(total, completion_tokens=completion_tokens)

    async def _collect_rounds(
        self, completion: PreparedCompletion, scores: Callable[[], S], logprobs: HeldLogprobs
    ) -> tuple[list[CompletionResult[S]], Usage]:
        answer, usage = CompletionResult(0, scores()), Usage(0, 0, 0)
        async with aclosing(self.stream(completion)) as items:
            async for item in items:
                if isinstance(item, Usage):
                    usage = item
                else:
                    logprobs.add(item)
                    await answer.add(item)
        return [answer], usage
