"""Statistics of an engine, which the router uses for its decisions and which workers export as
metrics."""

from dataclasses import dataclass

from pdserve.engine.kv import BlockCounts
from pdserve.engine.scheduling.plan import Plan

SMOOTHING = 0.2  # weight of the last prefill step in the measured rate
FADING = 0.98  # the slowest time fades by this factor with every faster step
GROWTH = 2.0  # one slower step raises it by at most this factor, as a step may have hung
MIN_CHUNK = 32  # a step with fewer chunk tokens does not measure the time of one


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Snapshot of an engine's requests, blocks and counters, taken between two steps."""

    running: int  # requests in the batch
    waiting: int  # requests queued
    waiting_tokens: int  # prefix tokens not yet computed
    held: int  # requests whose blocks others read: computed prefill_only ones and migrations
    reserved: int  # KV transfers that are not committed
    parked: int  # requests without a listening client; they get no steps
    parked_blocks: int  # blocks of parked requests; shared ones count each time
    held_blocks: int  # blocks of held requests; shared ones count each time
    oldest_s: dict[str, float]  # age of the oldest request with blocks, by their state
    blocks: BlockCounts  # of the first full-attention group
    step: int
    prefill_tokens_s: float  # measured rate; 0: unknown
    prompt_tokens: int  # counters from here on: prompt tokens computed
    generation_tokens: int
    recomputed_tokens: int  # generated tokens whose KV was lost or computed elsewhere
    preemptions: int
    prefix_queries: int  # prompt tokens looked up in the prefix cache
    prefix_hits: int  # prompt tokens found there


class StepMeter:
    """Measures engine steps: counts steps and tokens, and estimates the prefill rate and the
    duration of a step."""

    def __init__(self, token_s: float = 0.0) -> None:
        self.step = 0
        self.prompt_tokens = 0
        self.recomputed_tokens = 0
        self.prefill_tokens_s = 0.0
        self._token_s = token_s  # slowest seconds per token of a chunk, fading
        self._rows_s = 0.0  # slowest seconds of a step without chunks, fading

    def expected_s(self, plan: Plan) -> float:
        """Return the number of seconds within which the planned step should end, judged by the
        slowest earlier steps."""
        chunks = plan.num_tokens - plan.num_decode_rows
        return self._rows_s + chunks * self._token_s

    def count(self, plan: Plan, wall_s: float) -> None:
        """Record a finished step, which took `wall_s` seconds."""
        self.step += 1
        for sequence, start, end, choices, _ in plan.rows:
            prompt_len = sequence.job.prompt_len
            if start < prompt_len:
                self.prompt_tokens += min(end, prompt_len) - start
            computed = end - 1 if choices else end  # the last token is new, if it is sampled from
            if computed > start:
                self.recomputed_tokens += max(0, computed - max(start, prompt_len))
        chunks = plan.num_tokens - plan.num_decode_rows
        if chunks >= MIN_CHUNK:
            self._token_s = _slowest(self._token_s, wall_s / chunks)
        elif not chunks and plan.num_decode_rows:
            self._rows_s = _slowest(self._rows_s, wall_s)
        if chunks > plan.num_decode_rows and wall_s > 0:
            rate = chunks / wall_s
            old = self.prefill_tokens_s or rate
            self.prefill_tokens_s = old + SMOOTHING * (rate - old)


def _slowest(slowest: float, latest: float) -> float:
    return max(min(latest, GROWTH * slowest or latest), FADING * slowest)
