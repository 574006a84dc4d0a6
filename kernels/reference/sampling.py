"""Samples the next token of every stream of a step, on torch: edits of the logits, filters, noise,
log-probabilities.

Noise: a counter hash in 64-bit integers gives 32 random bits; u = (bits + 1/2) / 2**32 and
g = -log(-log(u)) are computed with additions, multiplications and divisions of IEEE doubles, each
rounded separately (no fused multiply-add, no library logarithm), in the order used here. A backend
that follows this order gets the same floats. The hash chains the finalizer of SplitMix64 (Steele,
Lea, Flood: Fast splittable pseudorandom number generators, 2014).

The edits of logits are a pure function of the settings and the generated ids; the state kept here
only avoids recomputation.

Each filter is a lower bound on the scaled logits, so equal logits are kept or removed together.

token = argmax(edited logits / T + gumbel(seed, choice, position, token id)), greedy = argmax. The
token depends only on the logits and the stream, not on the rest of the batch. Ties go to the lowest
id. A row without a finite best score (NaN logits) fails alone.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdserve.kernels.sampling_ops import GREEDY_BELOW, Mask, StreamSettings, TokenScores

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)
LN2 = 0.6931471805599453
SQRT2 = 1.4142135623730951
# log((1 + s) / (1 - s)) = 2 s (1 + z/3 + z^2/5 + ...), z = s^2 <= 0.0295: 11 terms reach 2^-53.
SERIES = tuple(1.0 / (2 * i + 1) for i in range(11))
FIRST_SORT = 256  # top_p rarely needs more tokens; sorting the whole vocabulary is slow


def gumbel_noise(seeds: Tensor, choices: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Return Gumbel noise, float32 [B, vocab], for int64 seeds, choices and positions [B]."""
    ids = torch.arange(vocab, device=seeds.device)
    return gumbel_at(seeds, choices, positions, ids.expand(len(seeds), vocab))


def gumbel_at(seeds: Tensor, choices: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Return the Gumbel noise of some token ids only: ids int64 [B, n] to noise float32 [B, n]."""
    u = _uniform(seeds, choices, positions, token_ids)
    return (-_log(-_log(u))).to(torch.float32)


def gumbel_argmax(scores: Tensor, seeds: Tensor, choices: Tensor, positions: Tensor) -> Tensor:
    """Return the argmax over the vocabulary of scores + gumbel_noise; ties go to the lowest id.

    scores float32 [B, vocab], finite or -inf with a finite maximum -> int64 [B]. The exact noise is
    computed only for tokens that may win according to the library's logarithm, whose error is far
    below the margin.
    """
    winners = torch.empty(len(scores), dtype=torch.int64, device=scores.device)
    ids = torch.arange(scores.shape[1], device=scores.device)[None]
    for row in range(len(scores)):  # the temporaries of one row fit into the CPU cache
        row_slice = slice(row, row + 1)
        noise = _uniform(seeds[row_slice], choices[row_slice], positions[row_slice], ids)
        noise.log_().neg_().log_().neg_()
        approximate = noise.add_(scores[row_slice])
        best = approximate.max()
        margin = 1e-3 + 1e-5 * scores[row_slice].max().abs()
        contenders = (approximate[0] >= best - margin).nonzero()[:, 0]
        exact = scores[row, contenders] + gumbel_at(
            seeds[row_slice], choices[row_slice], positions[row_slice], contenders[None]
        ).squeeze(0)
        winners[row] = contenders[exact.argmax()]
    return winners


def _uniform(seeds: Tensor, choices: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Return a pseudorandom number for each token id, float64 in (0, 1), exactly (bits + 1/2) /
    2**32."""
    key = _mix(seeds + GOLDEN)
    key = _mix((key ^ choices) + GOLDEN)
    key = _mix((key ^ positions) + GOLDEN)
    bits = _shift(_mix(key[:, None] + (token_ids + 1) * GOLDEN), 32)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-32)


def _shift(x: Tensor, count: int) -> Tensor:
    """Shift int64 numbers right as if they were unsigned."""
    return (x >> count).bitwise_and_((1 << (64 - count)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Apply the finalizer of the hash SplitMix64 to int64 numbers; products wrap modulo 2**64."""
    x = _shift(x, 30).bitwise_xor_(x).mul_(MULTIPLIER_1)
    x = _shift(x, 27).bitwise_xor_(x).mul_(MULTIPLIER_2)
    return _shift(x, 31).bitwise_xor_(x)


def _log(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive normal doubles, to a few units in the last place."""
    bits = x.view(torch.int64)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)  # [1, 2)
    high = mantissa > SQRT2
    mantissa = torch.where(high, mantissa * 0.5, mantissa)
    k = (exponent + high.to(torch.int64)).to(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    p = torch.full_like(z, SERIES[-1])
    for coefficient in SERIES[-2::-1]:
        p = p * z
        p = p + coefficient
    return k * LN2 + (2.0 * s) * p


class LogitEdits:
    """The edits of one stream's logits (bias, penalties, hidden ids), updated with its generated
    ids at each use."""

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
        """Return whether the logits of the stream's next token are edited at all."""
        return self._always or self._masks(num_generated)

    def apply(self, scores: Tensor, generated: list[int]) -> None:
        """Edit the stream's logits for its next token in place: one row, float32 [vocab]."""
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
    """Add `times` to the count of an id for each time that it occurs in `ids`."""
    index = _ids(ids, counts.device)
    counts.index_add_(0, index, torch.full((len(ids),), float(times), device=counts.device))


def disallowed(mask: Mask, scores: Tensor) -> Tensor:
    """Return which tokens of a row of scores a mask excludes, bool [vocab]."""
    bits = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little", count=len(scores))
    return torch.from_numpy(bits == 0).to(scores.device)


def _ids(ids: object, device: torch.device) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=device)  # type: ignore[call-overload]


def candidates(scaled: Tensor, settings: StreamSettings) -> Tensor:
    """Return the token ids that top_k, top_p and min_p keep, given logits / T [vocab]: int64 [n],
    ascending.

    In this order: the k best; of those, the best whose probabilities sum to top_p; of those, the
    ones with at least min_p times the best probability. The best token always stays.
    """
    vocab = len(scaled)
    peak = scaled.max()
    floor, remaining = torch.full_like(peak, -math.inf), scaled
    if 0 < settings.top_k < vocab:
        floor = scaled.topk(settings.top_k).values[-1]
        remaining = scaled[scaled >= floor]
    if settings.top_p < 1:
        floor = torch.maximum(floor, _nucleus_floor(remaining, settings.top_p))
    if settings.min_p > 0:
        floor = torch.maximum(floor, peak + math.log(settings.min_p))
    return (scaled >= torch.minimum(floor, peak)).nonzero()[:, 0]


def _nucleus_floor(scaled: Tensor, top_p: float) -> Tensor:
    """Return the smallest logit of the nucleus, the best tokens whose probabilities add up to top_p
    (Holtzman et al., arXiv:1904.09751)."""
    total = scaled.double().logsumexp(0)
    count = min(len(scaled), FIRST_SORT)
    while True:
        best = scaled.topk(count).values
        mass = (best.double() - total).exp().cumsum(0)
        num_inside = int((mass < top_p).sum())
        if num_inside < count or count == len(scaled):
            return best[min(num_inside, count - 1)]
        count = len(scaled)


class ReferenceStream:
    """The sampling state of one token stream: its settings, and its logit edits, cached from token
    to token."""

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
    """Create the sampling state of a token stream over a vocabulary of `vocab` ids."""
    return ReferenceStream(settings, vocab)


@torch.inference_mode()
def sample(
    logits: Tensor,
    rows: Sequence[int],
    streams: Sequence[ReferenceStream],
    generated: Sequence[list[int]],
    masks: Sequence[Mask | None] | None = None,
) -> list[int]:
    """Sample the next token of each stream; -1 for a stream whose best score is not finite.

    logits float32 [n, vocab] are not modified. Stream i uses row rows[i] of the logits; its ids so
    far are generated[i]. If masks[i] is set, only the tokens that it allows may be sampled.
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
    """Return the seeds (in two's complement), choices and positions from which the noise of these
    streams follows."""
    seeds = [streams[i].settings.seed for i in indices]
    return (
        torch.tensor([s - (1 << 64) if s >> 63 else s for s in seeds], device=device),
        torch.tensor([streams[i].settings.choice for i in indices], device=device),
        torch.tensor([len(generated[i]) for i in indices], device=device),
    )


@torch.inference_mode()
def logprobs(
    logits: Tensor, tokens: Sequence[int], count: int, also: Sequence[int] = ()
) -> list[TokenScores]:
    """Return for each row r of raw logits [rows, vocab] the log-probability of tokens[r], then
    those of the `count` best tokens of the row and of the ids in `also`."""
    token_ids = torch.tensor(tokens, device=logits.device)
    total = logits.logsumexp(dim=-1)
    token_logprobs = (logits.gather(1, token_ids[:, None])[:, 0] - total).tolist()
    best = _best(logits, total, count) if count else [()] * len(token_logprobs)
    if also:
        extra_logprobs = (
            logits[:, torch.tensor(also, device=logits.device)] - total[:, None]
        ).tolist()
        best = [
            (*pairs, *zip(also, row, strict=True))
            for pairs, row in zip(best, extra_logprobs, strict=True)
        ]
    return list(zip(token_logprobs, best, strict=True))


def _best(rows: Tensor, total: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """Return the `count` best tokens of each row with their log-probabilities, best first; ties go
    to the lowest id."""
    floors = rows.topk(min(count, rows.shape[1])).values[:, -1]
    best = []
    for row, floor, log_sum in zip(rows, floors, total.tolist(), strict=True):
        ids = (row >= floor).nonzero()[:, 0]
        pairs = sorted(
            zip(row[ids].tolist(), ids.tolist(), strict=True), key=lambda p: (-p[0], p[1])
        )
        best.append(tuple((i, value - log_sum) for value, i in pairs[:count]))
    return best
