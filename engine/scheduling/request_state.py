"""The scheduler's state of a request. Pure.

A `RequestState` exists from submit to the last event of the request; it has `Sequence`s while it
holds KV blocks. A prompt is one sequence until its last token has run; then each choice continues
as a separate sequence.
"""

from collections.abc import Sequence as Seq
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.api import FinishReason, Request, TokenLogprob, prefix_of
from pdserve.engine.constraints import RequestConstraints


class PooledState:
    """The pooled hidden state of a prompt, from which its embedding is made: the mean of the final
    hidden states of all tokens, or the state of the last or the first token. The mean adds one
    token after the other, so it is bitwise the same however the prompt is cut into chunks."""

    def __init__(self, kind: str) -> None:
        """`kind`: "mean" for the mean over all tokens, "last" or "cls" for the state of the last or
        the first token."""
        # These need states of earlier tokens than the last, which must not come from the cache.
        self.needs_all: Final = kind in ("mean", "cls")
        self._needs_first = kind == "cls"
        self._total: NDArray[np.float64] | None = None
        self._count = 0

    def take(self, states: NDArray[np.float32], start: int) -> None:
        """Add the final hidden states, float32 [tokens, hidden], of the prompt tokens from index
        `start` on; for "last", replace the state by the last of them. `start` 0, the first token,
        begins again, as after a preemption."""
        if self._needs_first:
            states = states[: int(not start)]
        if self._total is None or not start or not self.needs_all:
            self._total, self._count = np.zeros(states.shape[1]), 0
        for state in states:  # in this order; numpy's sum may use another
            self._total += state
        self._count += len(states)

    def values(self) -> tuple[float, ...] | None:
        """Return the pooled state as float32 numbers; None if one of them is not finite."""
        assert self._total is not None  # a prompt has tokens
        values = (self._total / self._count).astype(np.float32)
        return tuple(values.tolist()) if np.isfinite(values).all() else None


class Sequence:
    """A chain of token ids and, per layer group, the blocks that hold its KV.

    `block_tables[g][i]` is the block with the KV of tokens [i * block_size, (i + 1) * block_size);
    it is 0 after the attention window of group g has passed these tokens. Only block_tables.py
    changes the tables and their counters. `rewritten_from[g]` is the first index of table g that
    the ModelRunner must read again: a changed table or a new slot (JobTable.admit) lowers it, and
    the runner raises it after reading.
    """

    __slots__ = (
        "block_tables",
        "choices",
        "ids",
        "is_prefix",
        "job",
        "num_computed",
        "num_published",
        "num_trimmed",
        "parent_hash",
        "rewritten_from",
        "slot",
        "writable_to",
    )

    def __init__(
        self, job: "RequestState", ids: list[int], choices: tuple[int, ...], parent_hash: bytes
    ):
        self.job: Final = job
        self.ids = ids
        self.choices = choices  # those that sample from the row of ids[-1]
        self.is_prefix = True  # the job's prefix is not fully computed yet
        self.num_computed = 0  # KV of ids[:num_computed] is in the blocks
        self.slot = -1  # row of the runner's tables; -1: not in the batch
        self.block_tables: list[list[int]] = []
        self.rewritten_from: list[int] = []
        # Tokens [num_computed, writable_to) have unshared blocks: no need to check the pools.
        self.writable_to = 0
        self.num_trimmed: list[int] = []  # leading blocks released, per group
        self.num_published = 0  # leading full blocks offered to the prefix cache
        self.parent_hash = parent_hash  # hash of the last published block, parent of the next

    @property
    def num_left(self) -> int:
        """Number of the sequence's tokens whose KV is still to be computed."""
        return len(self.ids) - self.num_computed

    @property
    def may_sample(self) -> bool:
        """Whether the constraints of the sequence's choices allow a step that samples their next
        tokens now: such a step includes the row of ids[-1]."""
        constraints = self.job.constraints
        return constraints is None or all(constraints.may_sample(c) for c in self.choices)


class RequestState:
    """State of one request in the scheduler, from submit to its last event."""

    def __init__(
        self,
        request: Request,
        order: int,
        arrived_s: float,
        max_tokens: int,
        seed_hash: bytes,
        pooling: str = "",
    ) -> None:
        """`pooling`: kind of pooling, "mean", "last" or "cls", of requests for a pooled state;
        empty if the model pools none."""
        self.request: Final = request
        self.key: Final = request.key
        self.prompt_len: Final = len(request.prompt_ids)
        self.order: Final = order  # of arrival
        self.rank: Final = (request.priority, order)  # within its tenant; lower is earlier
        self.arrived_s: Final = arrived_s
        self.max_tokens: Final = max_tokens
        self.seed_hash: Final = seed_hash  # parent of the first block's chain hash
        states = request.choices
        count = request.params.n
        self.generated = [list(c.generated_ids) for c in states] or [[] for _ in range(count)]
        self.finish: list[FinishReason | None] = [c.finish for c in states] or [None] * count
        self.sequences: list[Sequence] = []
        self.slots: list[int] = []  # slots of the job that no sequence has yet
        self.hashes: list[bytes] | None = None  # chain hashes of the prefix, while it waits
        self.cached_tokens = 0  # found in the prefix cache at the first admission
        self.announced = False  # whether Scheduled was sent
        # Log-probabilities of prompt tokens 1..; None if not requested, or already sent.
        resumed = any(self.generated) or any(self.finish)
        wants_scores = request.params.prompt_logprobs is not None and not resumed
        self.prompt_scores: list[TokenLogprob] | None = [] if wants_scores else None
        self.streams: dict[int, Any] = {}  # the sampler's state of each choice
        self.pooled = PooledState(pooling) if request.pool else None
        self.constraints: RequestConstraints | None = None  # None: every token may be sampled
        # Whether a next token depends only on the logits and the number of earlier tokens, and only
        # the token is returned.
        self.is_plain = (
            request.params.logprobs is None
            and request.params.repetition_penalty == 1
            and not request.params.presence_penalty
            and not request.params.frequency_penalty
        )

    def precedes(self, other: "RequestState") -> bool:
        """Whether this request gets KV blocks before `other`: by priority and then arrival if both
        have the same tenant, otherwise by arrival."""
        if self.request.tenant == other.request.tenant:
            return self.rank < other.rank
        return self.order < other.order

    @property
    def is_ready(self) -> bool:
        """Whether the request's constraints, such as a grammar, are ready for its next tokens; True
        without constraints."""
        return self.constraints is None or self.constraints.is_ready

    @property
    def unfinished(self) -> list[int]:
        """Indices of the choices that have not ended."""
        return [c for c, finish in enumerate(self.finish) if finish is None]

    @property
    def num_places(self) -> int:
        """Number of slots (rows of the batch) that the request needs."""
        return len(self.unfinished) if self.request.generates else 1

    @property
    def num_left(self) -> int:
        """Number of tokens of the request's prefix (see prefix_ids) still to be computed. For a
        request without blocks it counts all of them, even those that the prefix cache may hold."""
        if self.sequences:
            return self.sequences[0].num_left
        unfinished = self.unfinished
        more = len(self.generated[unfinished[0]]) if len(unfinished) == 1 else 0
        return self.prompt_len + more

    def prefix(self) -> tuple[int, ...]:
        """Return the token ids that must be computed before the request's next token (see
        prefix_ids)."""
        if self.request.prefill_only:
            return self.request.prompt_ids
        return prefix_of(self.request.prompt_ids, [self.generated[c] for c in self.unfinished])

    def trunk_choices(self) -> tuple[int, ...]:
        """Return the choices whose next token is sampled from the last token of the shared prefix:
        those without generated tokens, or the only unfinished one."""
        if not self.request.generates:
            return ()
        unfinished = self.unfinished
        if len(unfinished) == 1:
            return tuple(unfinished)
        return tuple(c for c in unfinished if not self.generated[c])

    def branch_ids(self, choice: int) -> list[int]:
        """Return the ids of the prompt and of the tokens that one choice has generated."""
        return [*self.request.prompt_ids, *self.generated[choice]]

    def hit_limit(self, prefix: Seq[int]) -> int:
        """Return how many tokens of the prefix may come from the prefix cache. Tokens whose hidden
        states are needed, for sampling, prompt log-probabilities or pooling, must be computed."""
        if self.prompt_scores is not None or (self.pooled and self.pooled.needs_all):
            return 0
        return len(prefix) if self.request.prefill_only else len(prefix) - 1
