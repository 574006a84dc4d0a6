"""The record that the host sends to the device for each sample of a step, the choice of one token:
one packed RECORD.

`position` is the number of generated ids. `edited` is the sample's row in the edited scores, -1 if
the logits are not edited. `mask` is the start of its mask in the step's words, -1 for none. `fresh`
and `num_fresh` select the step's words for its marks: ids that the marks do not count yet, and -1 -
id for ids that have left the penalty window. `marks` and `bias` are addresses of the stream's
tensors [vocab], 0 for none.
"""

import numpy as np
import triton
import triton.language as tl

RECORD = np.dtype(
    [
        ("seed", "<u8"),
        ("choice", "<i8"),
        ("position", "<i8"),
        ("marks", "<i8"),  # int32: see logit_edits.py
        ("bias", "<i8"),  # float32
        ("top_p", "<f8"),
        ("row", "<i4"),
        ("edited", "<i4"),
        ("top_k", "<i4"),
        ("temperature", "<f4"),  # 0: greedy
        ("log_min_p", "<f4"),
        ("repetition", "<f4"),
        ("presence", "<f4"),
        ("frequency", "<f4"),
        ("hide", "<i4"),  # whether ids marked as hidden are excluded
        ("mask", "<i4"),
        ("fresh", "<i4"),
        ("num_fresh", "<i4"),
    ]
)
SIZE = tl.constexpr(RECORD.itemsize)


def _offset(name: str) -> tl.constexpr:
    return tl.constexpr(RECORD.fields[name][1])  # type: ignore[index]


SEED, CHOICE, POSITION = _offset("seed"), _offset("choice"), _offset("position")
MARKS, BIAS, TOP_P = _offset("marks"), _offset("bias"), _offset("top_p")
ROW, EDITED, TOP_K = _offset("row"), _offset("edited"), _offset("top_k")
TEMPERATURE, LOG_MIN_P = _offset("temperature"), _offset("log_min_p")
REPETITION, PRESENCE, FREQUENCY = _offset("repetition"), _offset("presence"), _offset("frequency")
HIDE, MASK = _offset("hide"), _offset("mask")
FRESH, NUM_FRESH = _offset("fresh"), _offset("num_fresh")


@triton.jit
def field(records, sample, offset: tl.constexpr, dtype: tl.constexpr):
    """Load one field of a sample's record; `records` points to the bytes of all records."""
    return tl.load((records + sample * SIZE + offset).to(tl.pointer_type(dtype)))


@triton.jit
def is_filtered(records, sample):
    """Return whether a sample has a top_k, top_p or min_p that excludes tokens."""
    narrowed = (field(records, sample, TOP_K, tl.int32) > 0) | (
        field(records, sample, TOP_P, tl.float64) < 1
    )
    return narrowed | (field(records, sample, LOG_MIN_P, tl.float32) > float("-inf"))


@triton.jit
def scores_of(records, sample, logits, stride, edited_scores, vocab):
    """Return a pointer to the scores [vocab] from which a token is sampled: a row of the edited
    scores if the sample's logits are edited, else of the logits."""
    edited = field(records, sample, EDITED, tl.int32).to(tl.int64)
    row = field(records, sample, ROW, tl.int32).to(tl.int64)
    return tl.where(edited >= 0, edited_scores + edited * vocab, logits + row * stride)
