"""Runs a prepared completion at the router and turns its tokens into an answer, for every API.

Ownership: a stream owns its requests at the router; closing it early cancels them at once.
Each completion ends with exactly one Usage, or raises one ServiceError.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from pdserve.gateway.catalog import ServedModel
from pdserve.gateway.choice import Choice, Delta, ScoredToken, score_prompt
from pdserve.gateway.content.answer_format import AnswerFormat
from pdserve.gateway.limits import AdmittedRequest
from pdserve.gateway.observability.meter import Meter
from pdserve.gateway.requests.sampling import RequestedSampling
from pdserve.gateway.router_client.merge import merge
from pdserve.gateway.router_client.upstream import Upstream
from pdserve.gateway.sampling import check_logprobs
from pdserve.gateway.text.parts import ContentPart, TextPart
from pdserve.protos.common_pb2 import (
    CANCELLED,
    INTERNAL,
    Finished,
    SamplingParams,
    Start,
    TokenLogprob,
    Tokens,
)
from pdserve.protos.router_pb2 import RequestEvent
from pdserve.services.host.errors import ServiceError

END_EVENTS_S = 2.0  # for the router to end a request whose choices have all ended here


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: Sequence[int]
    text: str  # as echoed
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class PreparedCompletion:
    """One API call, ready to run. Choice c of prompt p is answered as p * (n or best_of) + c."""

    id: str
    model: ServedModel
    prompts: Sequence[Prompt]
    sampling: RequestedSampling
    admitted: AdmittedRequest
    meter: Meter
    timeout_s: float
    queue_timeout_s: float
    continues: bool = False  # the answer goes on from the prompt's text
    echo: bool = False
    echo_only: bool = False  # the one generated token is not part of the answer
    cache_salt: bytes = b""
    priority: int = 0
    tenant: bytes = b""
    format: AnswerFormat = field(default_factory=AnswerFormat)  # of what the model writes
    rounds: "Rounds | None" = None  # the answer has several of them, of one choice


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    inexact: bool = False  # KV or tokens of another KV identity took part
    reasoning_tokens: int = 0  # of those of the completion

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.inexact or other.inexact,
            self.reasoning_tokens + other.reasoning_tokens,
        )


Run = Callable[[PreparedCompletion], AsyncGenerator[Delta | Usage, None]]

WriteDelta = Callable[[Delta], bool]
"""Sends a delta to the client at once; false: it did not, and the delta is still to be sent."""


class Rounds(Protocol):
    """What asks the model again, with the results of tools, until its answer is complete."""

    def stream(
        self, completion: PreparedCompletion, run: Run
    ) -> AsyncGenerator[Delta | Usage, None]: ...


class Scores(Protocol):
    """What holds the scored tokens of a whole choice."""

    async def add(self, tokens: Sequence[ScoredToken]) -> None: ...


S = TypeVar("S", bound=Scores)
T = TypeVar("T")


@dataclass(slots=True)
class CompletionResult(Generic[S]):
    """One whole choice."""

    index: int
    scores: S
    content: list[ContentPart] = field(default_factory=list)
    num_tokens: int = 0
    finish: str = ""
    ids: list[int] = field(default_factory=list)  # of the generated tokens
    prompt_scores: Sequence[TokenLogprob] = ()  # of its prompt's tokens but the first

    async def add(self, delta: Delta) -> None:
        self.content += delta.content
        await self.scores.add(delta.tokens)
        self.ids += delta.ids
        self.num_tokens = delta.num_tokens
        self.finish = delta.finish or self.finish


class HeldLogprobs:
    """Counts the log-probabilities that an answer holds until it is complete."""

    def __init__(self, completion: PreparedCompletion, instead: str = "a stream, or ") -> None:
        """`instead`: what else a client may ask for. Raises ServiceError if its max_tokens allows
        too many; without one it is seen as they come."""
        self._sampling = completion.sampling
        self._instead = instead
        self._num_tokens = 0
        params = [prompt.params for prompt in completion.prompts]
        most = sum(max(1, one.n) * one.max_tokens for one in params)
        check_logprobs(self._sampling, most, instead)

    def add(self, delta: Delta) -> None:
        """Raises ServiceError if they are too many."""
        self._num_tokens += len(delta.ids)
        check_logprobs(self._sampling, self._num_tokens, self._instead)


class Completions:
    """Runs completions, as a stream of deltas or whole."""

    def __init__(self, upstream: Upstream, clock: Callable[[], float]) -> None:
        self._upstream = upstream
        self._clock = clock

    def stream(
        self, completion: PreparedCompletion, write: WriteDelta | None = None
    ) -> AsyncGenerator[Delta | Usage, None]:
        """Deltas of all choices as they come, then the Usage. Those that `write` sends are left
        out; it is called only while whoever iterates has dealt with all before. Raises
        ServiceError."""
        if completion.rounds is not None:
            return completion.rounds.stream(completion, self._run)
        return self._run(completion, write)

    async def _run(
        self, completion: PreparedCompletion, write: WriteDelta | None = None
    ) -> AsyncGenerator[Delta | Usage, None]:
        runs = self._runs(completion, write)
        async with aclosing(merge([run.events() for run in runs])) as events:
            async for delta in events:
                yield delta
        yield sum((run.usage() for run in runs), Usage(0, 0, 0))

    def _runs(
        self, completion: PreparedCompletion, write: WriteDelta | None = None
    ) -> list["_PromptRun"]:
        now = self._clock()
        alone = len(completion.prompts) == 1  # deltas of several wait for each other (merge)
        return [
            _PromptRun(self._upstream, completion, index, now, write if alone else None)
            for index in range(len(completion.prompts))
        ]

    async def collect(
        self, completion: PreparedCompletion, scores: Callable[[], S]
    ) -> tuple[list[CompletionResult[S]], Usage]:
        """Whole answers, each with `scores` of its own; of best_of candidates the n with the best
        mean log-probability. Raises ServiceError."""
        held = HeldLogprobs(completion)
        if completion.rounds is not None:
            return await self._collect_rounds(completion, scores, held)
        runs = self._runs(completion)
        answers: dict[int, CompletionResult[S]] = {}
        async with aclosing(merge([run.events() for run in runs])) as events:
            async for delta in events:
                held.add(delta)
                if delta.choice not in answers:
                    answers[delta.choice] = CompletionResult(delta.choice, scores())
                await answers[delta.choice].add(delta)
        kept: list[CompletionResult[S]] = []
        for run in runs:
            for choice in run.best(completion.sampling.n):
                answer = answers[choice.index]
                answer.index = len(kept)
                answer.prompt_scores = run.prompt_scores
                kept.append(answer)
        completion_tokens = sum(answer.num_tokens for answer in kept)
        total = sum((run.usage() for run in runs), Usage(0, 0, 0))
        return kept, replace(total, completion_tokens=completion_tokens)

    async def _collect_rounds(
        self, completion: PreparedCompletion, scores: Callable[[], S], held: HeldLogprobs
    ) -> tuple[list[CompletionResult[S]], Usage]:
        answer, usage = CompletionResult(0, scores()), Usage(0, 0, 0)
        async with aclosing(self.stream(completion)) as items:
            async for item in items:
                if isinstance(item, Usage):
                    usage = item
                else:
                    held.add(item)
                    await answer.add(item)
        return [answer], usage


class _PromptRun:
    """One prompt of a completion at the router."""

    def __init__(
        self,
        upstream: Upstream,
        completion: PreparedCompletion,
        index: int,
        now: float,
        write: WriteDelta | None,
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
        # Its tokens as every choice echoes them, once they are described.
        self._echoed: tuple[ScoredToken, ...] | None = None if completion.echo else ()
        self._withheld: dict[int, tuple[int, ...]] = {}  # ids by choice, whose text is yet to come
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
        """The n choices with the highest mean log-probability, or all in order."""
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
            raise ServiceError(INTERNAL, "an answer was cut short")
        counts = {choice.index: choice.num_tokens for choice in self._choices}
        self._completion.meter.finished(self._finished, counts)

    def _note(self, event: RequestEvent) -> None:
        """An event without tokens. Raises ServiceError if the request failed."""
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
        start = Start(
            request=self._request,
            model=completion.model.card.name,
            cache_salt=completion.cache_salt,
            priority=completion.priority,
            tenant=completion.tenant,
            prompt_ids=self._prompt.ids,
            params=self._prompt.params,
            trace_parent=completion.meter.span.context.parent,
            trace_state=completion.meter.span.context.state,
            remaining_ms=max(1, int((completion.timeout_s - elapsed) * 1000)),
            queue_remaining_ms=max(1, int((completion.queue_timeout_s - elapsed) * 1000)),
        )
        seed = completion.sampling.seed
        start.seed = secrets.randbits(63) if seed is None else seed % 2**64
        return start

    def _take_token(self, number: int, id_: int) -> Delta | None:
        """The next token of a choice; what it adds, unless that is written at once."""
        choice = self._choices[number]
        if choice.closed:
            return None
        delta = self._counted(number, choice.push_id(id_), 1, ended=False)
        return None if delta is None or (self._write and self._write(delta)) else delta

    def _push(self, tokens: Tokens) -> Delta | None:
        choice = self._choices[tokens.choice]
        if choice.closed:
            return None
        delta = choice.push(tokens)
        return self._counted(tokens.choice, delta, len(tokens.ids), ended=bool(tokens.finish))

    def _counted(self, number: int, delta: Delta, num_ids: int, *, ended: bool) -> Delta | None:
        """Counts new tokens of a choice; the delta as it is sent. `ended`: decode ended it."""
        self._completion.admitted.first_token()
        self._completion.meter.tokens(delta.choice, num_ids)
        if delta.finish is not None:
            self._num_open -= 1
            self._completion.meter.ended(delta.finish)
            if not ended:  # a stop string has, and decode does not know yet
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

    async def _scored_prompt(self) -> tuple[ScoredToken, ...]:
        vocabulary = self._completion.model.text.vocabulary
        num_top = self._completion.sampling.logprobs or 0
        return await score_prompt(vocabulary, self._prompt.ids, self.prompt_scores, num_top)

    def _echo(self, delta: Delta) -> Delta:
        """The first delta of a choice, with the prompt before it."""
        prompt = TextPart(self._prompt.text)
        scores = self._echoed or ()
        if self._completion.echo_only:
            return Delta(delta.choice, (prompt,), scores, 0, "length")
        return delta._replace(content=(prompt, *delta.content), tokens=scores + delta.tokens)


async def _last(events: AsyncIterator[T]) -> list[T]:
    """What a router still says of a request whose choices have all ended here, if it comes within
    END_EVENTS_S; else nothing."""
    try:
        async with asyncio.timeout(END_EVENTS_S):
            return [event async for event in events]
    except TimeoutError:
        return []
