"""Keeps all output of one attempt, so that it can be sent again from any point; pure."""

from collections.abc import Iterator, Sequence

from pdserve.engine.api import FinishReason, NewTokens, Pooled, PromptScored, Request, TokenLogprob

MAX_IDS = 1024  # ids repeated in one event; fewer with log-probabilities:
MAX_LOGPROBS = 256


class Transcript:
    """The ids, log-probabilities and finish reasons of a request's choices since its first start,
    or its embedding."""

    def __init__(self, request: Request) -> None:
        self._key = request.key
        self._scored = request.params.logprobs is not None
        num_choices = len(request.choices) or request.params.n
        initial_ids = [list(choice.generated_ids) for choice in request.choices]
        self._ids: list[list[int]] = initial_ids or [[] for _ in range(num_choices)]
        self._base = [len(ids) for ids in self._ids]  # ids that other attempts generated
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(num_choices)]
        self._ends: list[FinishReason | None] = [None] * num_choices
        self._prompt: PromptScored | Pooled | None = None  # output for the prompt
        self._prompt_len = len(request.prompt_ids)

    @property
    def weight(self) -> int:
        """Approximate memory use, in token ids, including the prompt."""
        scores = [row for choice in self._logprobs for row in choice]
        scores += self._prompt.logprobs if isinstance(self._prompt, PromptScored) else ()
        candidates = sum(1 + len(score.top) for score in scores)
        candidates += len(self._prompt.values) if isinstance(self._prompt, Pooled) else 0
        return self._prompt_len + sum(map(len, self._ids)) + 4 * candidates

    def take(self, event: NewTokens | PromptScored | Pooled) -> None:
        """Add an event; the events of a choice come in order."""
        if not isinstance(event, NewTokens):
            self._prompt = event
            return
        self._ids[event.choice] += event.ids
        if event.logprobs:
            self._logprobs[event.choice] += event.logprobs
        if event.finish is not None:
            self._ends[event.choice] = event.finish

    def covers(self, counts: Sequence[int]) -> bool:
        """Whether everything after the first `counts` ids of each choice can be sent again.

        It cannot if that includes log-probabilities of ids that another attempt generated, which
        are unknown here.
        """
        return not self._scored or all(
            self._count(counts, choice) >= base for choice, base in enumerate(self._base)
        )

    def since(self, counts: Sequence[int]) -> Iterator[NewTokens | PromptScored | Pooled]:
        """Everything after the first `counts` ids of each choice, in parts; a missing count is
        0."""
        if self._prompt is not None:
            yield self._prompt
        for choice in range(len(self._ids)):
            yield from self._choice_since(choice, self._count(counts, choice))

    def _choice_since(self, choice: int, count: int) -> Iterator[NewTokens]:
        ids, base, end = self._ids[choice], self._base[choice], self._ends[choice]
        max_ids = MAX_LOGPROBS if self._scored else MAX_IDS
        start = min(count, len(ids))
        while start < len(ids):
            stop = min(len(ids), start + max_ids)
            logprobs = self._logprobs[choice][max(0, start - base) : max(0, stop - base)]
            finish = end if stop == len(ids) else None
            yield NewTokens(
                self._key, choice, start, tuple(ids[start:stop]), tuple(logprobs), finish
            )
            start = stop
        if end is not None and count >= len(ids):
            yield NewTokens(self._key, choice, len(ids), (), (), end)

    @staticmethod
    def _count(counts: Sequence[int], choice: int) -> int:
        return counts[choice] if choice < len(counts) else 0
