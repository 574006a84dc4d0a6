"""Runs a prepared completion and turns its tokens into an answer, for every API.

Ownership: a stream owns its requests at the router; closing it early cancels them at once.
Each completion ends with exactly one Usage, or raises one ServiceError.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from pdserve.gateway.choice import Delta, ScoredToken
from pdserve.gateway.prepared_completion import PreparedCompletion, Usage, WriteText
from pdserve.gateway.prompt_run import PromptRun
from pdserve.gateway.router_client.merge import merge
from pdserve.gateway.router_client.upstream import Upstream
from pdserve.gateway.sampling import check_logprobs
from pdserve.gateway.text.parts import ContentPart
from pdserve.protos.common_pb2 import TokenLogprob


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
        if completion.rounds is not None:
            return completion.rounds.stream(completion, self._run)
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
        if completion.rounds is not None:
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
