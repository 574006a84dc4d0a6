"""Edits of logits before tokens are sampled: those of kernels/reference/sampling.py, in one launch.

A stream with edits owns a tensor of marks, int32 [vocab]: how often an id was generated, whether it
was seen (in prompt or output), whether it is hidden until min_tokens; and a float32 bias, if set.
With a penalty window, the marks count the ids of prompt and output within the window, and an id is
seen while its count is not 0. A step updates the marks with the new ids and the ids that have left
the window, and writes the edited scores of the samples with edits; other samples read the logits
directly.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.cuda.sampling.records import (
    BIAS,
    FREQUENCY,
    FRESH,
    HIDE,
    MARKS,
    MASK,
    NUM_FRESH,
    PRESENCE,
    REPETITION,
    ROW,
    field,
)
from pdserve.kernels.sampling_ops import StreamSettings

TILE = 2048
SEEN = tl.constexpr(-(1 << 31))
HIDDEN = tl.constexpr(1 << 30)
COUNT = tl.constexpr((1 << 30) - 1)


def new_marks(settings: StreamSettings, vocab: int, device: torch.device) -> Tensor:
    """Return the marks of a stream before its first generated token, int32 [vocab]: which ids the
    prompt has, and which are hidden until min_tokens."""
    marks = torch.zeros(vocab, dtype=torch.int32, device=device)
    prompt = _ids(settings.penalized_prompt, device)
    if settings.penalty_window:
        ones = torch.ones(len(prompt), dtype=torch.int32, device=device)
        marks.index_add_(0, prompt, ones)  # bincount would wait for the device
    marks[prompt] |= SEEN.value
    hidden = _ids(settings.masked_ids, device)
    marks[hidden] = marks[hidden] | HIDDEN.value
    return marks


def new_bias(settings: StreamSettings, vocab: int, device: torch.device) -> Tensor:
    """Return a stream's bias of the logits, float32 [vocab]. Ids without a bias have -0.0, which
    changes no number when added."""
    bias = torch.full((vocab,), -0.0, device=device)
    bias[_ids(list(settings.logit_bias), device)] = torch.tensor(
        list(settings.logit_bias.values()), device=device
    )
    return bias


def _ids(ids: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=device)


@triton.jit
def edit_kernel(
    records, words, edited_samples, logits, stride, edited_scores, vocab, TILE: tl.constexpr
):
    """Edit the logits of one sample in one tile of the vocabulary: update the stream's marks, and
    write the edited scores."""
    slot = tl.program_id(1).to(tl.int64)
    sample = tl.load(edited_samples + slot)
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = ids < vocab
    row = field(records, sample, ROW, tl.int32).to(tl.int64)
    x = tl.load(logits + row * stride + ids, mask=inside, other=0.0)

    bias = field(records, sample, BIAS, tl.int64)
    x += tl.load(bias.to(tl.pointer_type(tl.float32)) + ids, mask=inside & (bias != 0), other=-0.0)

    address = field(records, sample, MARKS, tl.int64)
    stream_marks = address.to(tl.pointer_type(tl.int32)) + ids
    marks = tl.load(stream_marks, mask=inside & (address != 0), other=0)
    num_fresh = field(records, sample, NUM_FRESH, tl.int32)
    if num_fresh > 0:
        fresh = words + field(records, sample, FRESH, tl.int32)
        old_marks = marks
        for i in range(num_fresh):
            word = tl.load(fresh + i)
            marks = tl.where(ids == word, (marks + 1) | SEEN, marks)
            decremented = tl.where((marks & COUNT) > 1, marks - 1, marks & HIDDEN)
            marks = tl.where(ids == -1 - word, decremented, marks)
        tl.store(stream_marks, marks, mask=inside & (marks != old_marks))

    repetition = field(records, sample, REPETITION, tl.float32)
    penalized = tl.where(x > 0, tl.math.div_rn(x, repetition), x * repetition)
    x = tl.where(marks < 0, penalized, x)
    count = marks & COUNT
    x -= tl.where(count > 0, field(records, sample, PRESENCE, tl.float32), 0.0)
    x -= field(records, sample, FREQUENCY, tl.float32) * count.to(tl.float32)
    hide = field(records, sample, HIDE, tl.int32) != 0
    x = tl.where(hide & ((marks & HIDDEN) != 0), float("-inf"), x)

    mask = field(records, sample, MASK, tl.int32)
    allowed = tl.load(words + mask + (ids >> 5), mask=inside & (mask >= 0), other=-1)
    x = tl.where(((allowed >> (ids & 31)) & 1) != 0, x, float("-inf"))
    tl.store(edited_scores + slot * vocab + ids, x, mask=inside)


def edit(
    records: Tensor, words: Tensor, edited_samples: Tensor, logits: Tensor, vocab: int
) -> Tensor:
    """Edit the logits of the samples `edited_samples`, int32 [n]; return the edited scores, float32
    [n, vocab]."""
    num_samples = len(edited_samples)
    scores = torch.empty(num_samples, vocab, device=logits.device)
    edit_kernel[triton.cdiv(vocab, TILE), num_samples](
        records,
        words,
        edited_samples,
        logits,
        logits.stride(0),
        scores,
        vocab,
        TILE=TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return scores
