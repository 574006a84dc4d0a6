"""Samples the next token of every stream of a step.

token = argmax(edited logits / T + gumbel(seed, choice, position, token id)), greedy = argmax. The
token depends only on the logits and the stream, not on the rest of the batch. Ties go to the lowest
id. A row without a finite best score (NaN logits) fails alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.kernels.reference.candidates import candidates
from pdserve.kernels.reference.logit_edits import LogitEdits, disallowed
from pdserve.kernels.reference.noise import gumbel_argmax, gumbel_at
from pdserve.kernels.streams import GREEDY_BELOW, Mask, StreamSettings


class ReferenceStream:
    """A stream's settings, and cached edits that depend on its generated ids."""

    def __init__(self, settings: StreamSettings, vocab: int) -> None:
        self.settings = settings
        self.vocab = vocab
        self._edits: LogitEdits | None = None

    def edits(self, device: torch.device) -> LogitEdits:
        """Return the stream's edits; the first call creates them on `device`, where they stay."""
        if self._edits is None:
            self._edits = LogitEdits(self.settings, self.vocab, device)
        return self._edits


def stream(settings: StreamSettings, vocab: int) -> ReferenceStream:
    """Create a token stream over a vocabulary of `vocab` ids."""
    return ReferenceStream(settings, vocab)


@torch.inference_mode()
def sample(
    logits: Tensor,
    rows: Sequence[int],
    streams: Sequence[ReferenceStream],
    generated: Sequence[list[int]],
    masks: Sequence[Mask | None] | None = None,
) -> list[int]:
    """Sample the next token of each stream; -1 if the best score is not finite.

    logits float32 [n, vocab] are not modified; stream i uses row rows[i] and has generated[i] so
    far. If masks[i] is set, only its tokens may be sampled.
    """
    if not rows:
        return []
    edits = [s.edits(logits.device) for s in streams]
    edited = [i for i, ids in enumerate(generated) if edits[i].active(len(ids))]
    masked = [(i, mask) for i, mask in enumerate(masks or ()) if mask is not None]
    scores = logits
    if edited or masked or list(rows) != list(range(len(logits))):
        scores = logits[torch.tensor(rows, device=logits.device)]  # a copy
    for i in edited:
        edits[i].apply(scores[i], generated[i])
    for i, mask in masked:
        scores[i].masked_fill_(disallowed(mask, scores[i]), float("-inf"))
    best = scores.argmax(dim=-1)  # NaN counts as the largest
    finite = scores.gather(1, best[:, None])[:, 0].isfinite().tolist()
    tokens = [t if is_finite else -1 for t, is_finite in zip(best.tolist(), finite, strict=True)]
    sampled = [
        i for i, s in enumerate(streams) if finite[i] and s.settings.temperature >= GREEDY_BELOW
    ]
    unfiltered = [i for i in sampled if not streams[i].settings.filters]
    for i in sampled:
        settings = streams[i].settings
        if settings.filters:
            scaled = scores[i] / settings.temperature
            ids = candidates(scaled, settings)
            noise = gumbel_at(*_keys([i], streams, generated, logits.device), ids[None])[0]
            tokens[i] = int(ids[(scaled[ids] + noise).argmax()])
    if unfiltered:
        temperatures = torch.tensor([streams[i].settings.temperature for i in unfiltered])
        scaled = scores[unfiltered] / temperatures[:, None].to(scores.device)
        chosen = gumbel_argmax(scaled, *_keys(unfiltered, streams, generated, logits.device))
        for i, token in zip(unfiltered, chosen.tolist(), strict=True):
            tokens[i] = token
    return tokens


def _keys(
    indices: list[int],
    streams: Sequence[ReferenceStream],
    generated: Sequence[list[int]],
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return seeds (in two's complement), choices and positions for the noise."""
    seeds = [streams[i].settings.seed for i in indices]
    return (
        torch.tensor([s - (1 << 64) if s >> 63 else s for s in seeds], device=device),
        torch.tensor([streams[i].settings.choice for i in indices], device=device),
        torch.tensor([len(generated[i]) for i in indices], device=device),
    )
