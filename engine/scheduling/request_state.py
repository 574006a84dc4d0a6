"""The scheduler's state of a request. Pure.

A `RequestState` is a request in any state; it has `Sequence`s while it holds blocks. A prompt is
one sequence until its last token has run; then each choice continues as a separate sequence.
"""

from collections.abc import Sequence as Seq
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.api import FinishReason, Request, TokenLogprob, prefix_of
from pdserve.engine.constraints import RequestConstraints


class PooledState:
    """The pooled state of a prompt: the mean of its final hidden states, or the last one. It is
    bitwise the same however the prompt is cut into chunks, because the mean adds one token after
    the other."""

    def __init__(self, kind: str) -> None:
        """`kind`: "mean" or "last"."""
        # The mean needs the states of all tokens, so none may come from the prefix cache.
        self.needs_all: Final = kind == "mean"
        self._total: NDArray[np.float64] | None = None
        self._count = 0

    def take(self, states: NDArray[np.float32], start: int) -> None:
        """Add the states, float32 [tokens, hidden], of the next tokens from `start` on, or of the
        last token if only that one counts. After a preemption a prompt starts again with token
        0."""
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
    """A chain of token ids and the blocks of its KV, per layer group.

    `block_tables[g][i]` holds the KV of tokens [i * block_size, (i + 1) * block_size); it is 0
    after the window has passed them. Only block_tables.py changes the tables and their counters.
    `rewritten_from[g]` is the first index of table g that the runner must read again: a changed
    table or a new slot (JobTable.admit) lowers it, and the runner raises it after reading.
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
        """Number of tokens whose KV is still to be computed."""
        return len(self.ids) - self.num_computed

    @property
    def may_sample(self) -> bool:
        """Whether a step may include the row of ids[-1], from which its choices sample."""
        constraints = self.job.constraints
        return constraints is None or all(constraints.may_sample(c) for c in self.choices)


class RequestState:
    """One request, from submit to its last event."""

    def __init__(
        self,
        request: Request,
        order: int,
        arrived_s: float,
        max_tokens: int,
        seed_hash: bytes,
        pooling: str = "",
    ) -> None:
        """`pooling`: the engine's kind of pooling, for a request with `pool`."""
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
        """Whether it gets blocks before `other`: by rank within a tenant, otherwise by arrival."""
        if self.request.tenant == other.request.tenant:
            return self.rank < other.rank
        return self.order < other.order

    @property
    def is_ready(self) -> bool:
        """Whether its constraints are ready for its next tokens."""
        return self.constraints is None or self.constraints.is_ready

    @property
    def unfinished(self) -> list[int]:
        """Choices that have not ended."""
        return [c for c, finish in enumerate(self.finish) if finish is None]

    @property
    def num_places(self) -> int:
        """Number of rows of a batch that the request needs."""
        return len(self.unfinished) if self.request.generates else 1

    @property
    def num_left(self) -> int:
        """Number of prefix tokens to compute; without blocks, before a prefix cache look-up."""
        if self.sequences:
            return self.sequences[0].num_left
        unfinished = self.unfinished
        more = len(self.generated[unfinished[0]]) if len(unfinished) == 1 else 0
        return self.prompt_len + more

    def prefix(self) -> tuple[int, ...]:
        """Return the current `prefix_ids` of the request."""
        if self.request.prefill_only:
            return self.request.prompt_ids
        return prefix_of(self.request.prompt_ids, [self.generated[c] for c in self.unfinished])

    def trunk_choices(self) -> tuple[int, ...]:
        """Return the choices that sample from the prefix's last token: those without generated ids,
        or the only unfinished one."""
        if not self.request.generates:
            return ()
        unfinished = self.unfinished
        if len(unfinished) == 1:
            return tuple(unfinished)
        return tuple(c for c in unfinished if not self.generated[c])

    def branch_ids(self, choice: int) -> list[int]:
        """Return prompt and generated ids of one choice."""
        return [*self.request.prompt_ids, *self.generated[choice]]

    def hit_limit(self, prefix: Seq[int]) -> int:
        """Return how many prefix tokens may come from the cache; rows with outputs must run."""
        if self.prompt_scores is not None or (self.pooled and self.pooled.needs_all):
            return 0
        return len(prefix) if self.request.prefill_only else len(prefix) - 1
