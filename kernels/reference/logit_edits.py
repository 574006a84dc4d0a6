"""Edits of a stream's logits before sampling: bias, penalties, masked ids, masks.

The edits are a pure function of the settings and the generated ids; the state kept here only avoids
recomputation.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdserve.kernels.streams import Mask, StreamSettings


class LogitEdits:
    """The edits of one stream, updated with its generated ids at each use."""

    def __init__(self, settings: StreamSettings, vocab: int, device: torch.device) -> None:
        self._settings = settings
        self._num_counted = 0  # generated ids
        self._bias = (
            (_ids(settings.logit_bias, device), torch.tensor(list(settings.logit_bias.values())))
            if settings.logit_bias
            else None
        )
        self._masked = _ids(settings.masked_ids, device) if settings.masked_ids else None
        self._counts = self._seen = None
        self._windowed = bool(settings.penalty_window) and settings.penalizes
        if self._windowed or settings.presence_penalty or settings.frequency_penalty:
            self._counts = torch.zeros(vocab, device=device)
        if self._counts is not None and self._windowed:
            _add(self._counts, settings.penalized_prompt, 1)
        if settings.repetition_penalty != 1:
            self._seen = torch.zeros(vocab, dtype=torch.bool, device=device)
            self._seen[_ids(settings.penalized_prompt, device)] = True
        self._always = any(x is not None for x in (self._bias, self._counts, self._seen))

    def active(self, num_generated: int) -> bool:
        """Return whether the logits of the next token are edited at all."""
        return self._always or self._masks(num_generated)

    def apply(self, scores: Tensor, generated: list[int]) -> None:
        """Edit one row of float32 logits [vocab] in place."""
        settings = self._settings
        self._count(generated)
        if self._bias is not None:
            ids, values = self._bias
            scores[ids] += values.to(scores.device)
        if self._seen is not None:
            penalty = settings.repetition_penalty
            penalized = torch.where(scores > 0, scores / penalty, scores * penalty)
            torch.where(self._seen, penalized, scores, out=scores)
        if self._counts is not None:
            scores -= settings.presence_penalty * (self._counts > 0)
            scores -= settings.frequency_penalty * self._counts
        if self._masked is not None and self._masks(len(generated)):
            scores[self._masked] = float("-inf")

    def _masks(self, num_generated: int) -> bool:
        return self._masked is not None and num_generated < self._settings.min_tokens

    def _count(self, generated: list[int]) -> None:
        added, removed = self._settings.penalty_changes(generated, self._num_counted)
        self._num_counted = len(generated)
        if not added:
            return
        if self._counts is not None:
            _add(self._counts, added, 1)
            _add(self._counts, removed, -1)
        if self._seen is not None:
            self._seen[_ids(added, self._seen.device)] = True
        if self._seen is not None and self._counts is not None and removed:
            ids = _ids(removed, self._seen.device)
            self._seen[ids] = self._counts[ids] > 0


def _add(counts: Tensor, ids: Sequence[int], times: int) -> None:
    """Add `times` to the counts for each occurrence of an id."""
    index = _ids(ids, counts.device)
    counts.index_add_(0, index, torch.full((len(ids),), float(times), device=counts.device))


def disallowed(mask: Mask, scores: Tensor) -> Tensor:
    """Return the tokens of one row of scores that a mask excludes, bool [vocab]."""
    bits = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little", count=len(scores))
    return torch.from_numpy(bits == 0).to(scores.device)


def _ids(ids: object, device: torch.device) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=device)  # type: ignore[call-overload]
