"""Figures of an engine for routing and metrics; counters run from its construction."""

from dataclasses import dataclass

from pdserve.engine.kv.block_pool import BlockCounts
from pdserve.engine.scheduling.plan import Plan

SMOOTHING = 0.2  # weight of the last prefill step in the measured rate
FADING = 0.98  # of the slowest steps, with every other one
GROWTH = 2.0  # that a slower step may add: one that hung is no measure of the next ones
LEAST_CHUNK = 32  # tokens of chunks in a step that says what a token of them takes


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot between two steps."""

    running: int  # requests in the batch
    waiting: int  # requests queued
    waiting_tokens: int  # prefix tokens not yet computed
    held: int  # requests whose blocks are read by others: computed prefill_only ones, and moves
    reserved: int  # hand-offs that are not committed
    parked: int  # requests that nobody listens to: they have no steps
    parked_blocks: int  # that they hold; shared ones count each time
    held_blocks: int  # of the used ones, likewise: those of held requests
    oldest_s: dict[str, float]  # age of the oldest request whose blocks are used, reserved, ...
    blocks: BlockCounts  # of the first full-attention group
    step: int
    prefill_tokens_s: float  # measured rate; 0: unknown
    prompt_tokens: int  # counters from here on: prompt tokens computed
    generation_tokens: int
    recomputed_tokens: int  # generated tokens whose KV was lost, or never here
    preemptions: int
    prefix_queries: int  # prompt tokens looked up in the prefix cache
    prefix_hits: int  # of them found


class StepMeter:
    """Counts steps, measures the prefill rate, and knows what a step may take."""

    def __init__(self, token_s: float = 0.0) -> None:
        self.step = 0
        self.prompt_tokens = 0
        self.recomputed_tokens = 0
        self.prefill_tokens_s = 0.0
        self._token_s = token_s  # of chunks; the slowest, fading
        self._rows_s = 0.0  # of a step without chunks; likewise

    def expected_s(self, plan: Plan) -> float:
        """What the step should take at most, as the slowest of the steps before it did."""
        chunks = plan.num_tokens - plan.num_decode_rows
        return self._rows_s + chunks * self._token_s

    def count(self, plan: Plan, wall_s: float) -> None:
        """One step that took `wall_s`."""
        self.step += 1
        for row in plan.rows:
            prompt_len = row.sequence.job.prompt_len
            if row.start < prompt_len:
                self.prompt_tokens += min(row.end, prompt_len) - row.start
            new = 1 if row.choices else 0  # the token that a choice goes on from
            self.recomputed_tokens += max(0, row.end - new - max(row.start, prompt_len))
        chunks = plan.num_tokens - plan.num_decode_rows
        if chunks >= LEAST_CHUNK:
            self._token_s = _slowest(self._token_s, wall_s / chunks)
        elif not chunks and plan.num_decode_rows:
            self._rows_s = _slowest(self._rows_s, wall_s)
        if chunks > plan.num_decode_rows and wall_s > 0:
            rate = chunks / wall_s
            old = self.prefill_tokens_s or rate
            self.prefill_tokens_s = old + SMOOTHING * (rate - old)


def _slowest(known: float, new: float) -> float:
    return max(min(new, GROWTH * known or new), FADING * known)
