"""The plan of an engine step (the rows of the batch and block copies), and the outcomes sampled
from its logits, as plain data. Pure.

Objects that are made for every row of every step are named tuples, because making a frozen
dataclass takes three times as long.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.api import Event, TokenLogprob
from pdserve.engine.kv import BlockCopy
from pdserve.engine.scheduling.request_state import Sequence


class Row(NamedTuple):
    """Row of the batch: tokens [start, end) of one sequence, one token in a decode row. The model
    returns hidden states only for the row's tokens from index `first_output` on."""

    sequence: Sequence
    start: int
    end: int
    choices: tuple[int, ...]  # those that sample from the last token's logits
    first_output: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class Plan:
    """Plan of one step. The block copies in `copies` run before anything is computed. A plan
    without rows only sends its events."""

    events: list[Event]
    copies: list[BlockCopy] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)  # rows with one token come first
    num_decode_rows: int = 0  # rows with one token

    @property
    def num_tokens(self) -> int:
        chunks = self.rows[self.num_decode_rows :]
        return self.num_decode_rows + sum(row.num_tokens for row in chunks)


class SampledToken(NamedTuple):
    """Next token of one choice, or the error because of which it has none."""

    token: int
    logprob: TokenLogprob | None = None
    error: str = ""
    param: str = ""  # request field at fault; if set, the error is fit for a client
    no_token: bool = False  # the error: the choice's constraints allow no token


class Outcome(NamedTuple):
    """What a computed row yields: sampled tokens, log-probabilities of prompt tokens, hidden states
    to pool."""

    tokens: tuple[SampledToken, ...] = ()  # one per choice of the row
    scores: tuple[TokenLogprob, ...] = ()  # of prompt tokens start + 1 .. end, if requested
    # For a pooled row: float32 [outputs, hidden] of tokens first_output .. end - 1.
    states: NDArray[np.float32] | None = None
    is_late: bool = False  # its mask was not ready: the row runs again, as if it had not run
