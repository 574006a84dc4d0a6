"""Sampling with the native kernels: `stream`, `sample` and `logprobs` of kernels/streams.py."""

from collections.abc import Sequence
from typing import Any

from pdserve.kernels._native import Context, NativeSampler, Stream
from pdserve.kernels.streams import Mask, StreamSettings, TokenScores


class CpuSampling:
    """A SamplingOps on the threads of a context. Not thread-safe: make one call at a time."""

    def __init__(self, context: Context) -> None:
        self._sampler = NativeSampler(context)

    def stream(self, settings: StreamSettings, vocab: int) -> Stream:
        """Create a token stream. Raises ValueError for ids outside the vocabulary."""
        return Stream(
            vocab,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            seed=settings.seed,
            choice=settings.choice,
            repetition_penalty=settings.repetition_penalty,
            presence_penalty=settings.presence_penalty,
            frequency_penalty=settings.frequency_penalty,
            logit_bias=dict(settings.logit_bias),
            masked_ids=settings.masked_ids,
            min_tokens=settings.min_tokens,
            penalty_window=settings.penalty_window,
            prompt_ids=settings.penalized_prompt,
        )

    def sample(
        self,
        logits: Any,
        rows: list[int],
        streams: list[Stream],
        generated: list[list[int]],
        masks: list[Mask | None] | None = None,
    ) -> list[int]:
        """Sample like kernels/reference/sampling.py, with one native call for the whole step."""
        return self._sampler.sample(logits, rows, streams, generated, masks)

    def logprobs(
        self, logits: Any, tokens: list[int], count: int, also: Sequence[int] = ()
    ) -> list[TokenScores]:
        """Compute the values of kernels/reference/logprobs.py, with sums in doubles."""
        return self._sampler.logprobs(logits, tokens, count, also)
