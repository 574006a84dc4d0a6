"""What changes a choice's logits before the pick: bias, penalties, masked stop ids.

A pure function of (prompt, generated ids, params): the notes kept here only save computing it anew.
"""

import torch
from torch import Tensor

from pdserve.engine.request import SamplingParams
from pdserve.engine.sequence import Job


class LogitEdits:
    """The edits of one choice, brought up to date with its generated ids at each use."""

    def __init__(self, job: Job, choice: int, stop_ids: frozenset[int], like: Tensor) -> None:
        params = job.request.params
        self._params: SamplingParams = params
        self._generated = job.generated[choice]
        self._num_counted = 0
        vocab, device = like.shape[-1], like.device
        self._bias = (
            (_ids(params.logit_bias, device), torch.tensor(list(params.logit_bias.values())))
            if params.logit_bias
            else None
        )
        self._stops = _ids(sorted(stop_ids), device) if params.min_tokens and stop_ids else None
        self._counts = self._seen = None
        if params.presence_penalty or params.frequency_penalty:
            self._counts = torch.zeros(vocab, device=device)
        if params.repetition_penalty != 1:
            self._seen = torch.zeros(vocab, dtype=torch.bool, device=device)
            self._seen[_ids(job.request.prompt_ids, device)] = True

    @property
    def active(self) -> bool:
        """Whether the next pick is edited at all."""
        return self._always or self._masks_stops

    @property
    def _always(self) -> bool:
        return self._bias is not None or self._counts is not None or self._seen is not None

    @property
    def _masks_stops(self) -> bool:
        return self._stops is not None and len(self._generated) < self._params.min_tokens

    def apply(self, scores: Tensor) -> None:
        """Edits one row of float32 logits [vocab] in place."""
        params = self._params
        self._count()
        if self._bias is not None:
            ids, values = self._bias
            scores[ids] += values.to(scores.device)
        if self._seen is not None:
            penalty = params.repetition_penalty
            lowered = torch.where(scores > 0, scores / penalty, scores * penalty)
            torch.where(self._seen, lowered, scores, out=scores)
        if self._counts is not None:
            scores -= params.presence_penalty * (self._counts > 0)
            scores -= params.frequency_penalty * self._counts
        if self._masks_stops and self._stops is not None:
            scores[self._stops] = float("-inf")

    def _count(self) -> None:
        fresh = self._generated[self._num_counted :]
        self._num_counted = len(self._generated)
        if not fresh:
            return
        if self._counts is not None:
            ids = _ids(fresh, self._counts.device)
            self._counts.index_add_(0, ids, torch.ones(len(fresh), device=ids.device))
        if self._seen is not None:
            self._seen[_ids(fresh, self._seen.device)] = True


def _ids(ids: object, device: torch.device) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=device)  # type: ignore[call-overload]
