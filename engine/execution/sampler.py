"""Samples the next tokens of a step, and plans the following step before these tokens are known.

A step that is launched ahead has the rows of the previous step, except those whose choice certainly
ends with the previous step. If a choice has ended by a token that could not be foreseen,
StepProgress discards its row.

The backend samples each token (kernels/reference/sampling.py) as a function of the logits and of
the choice's stream (its random numbers and sampling settings), independent of the other rows in the
batch. A row whose logits are not finite fails alone, and so does a row whose constraints allow no
token.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import islice
from typing import Any

from pdserve.engine.api import SamplingParams, TokenLogprob
from pdserve.engine.constraints import Bitmask, RequestConstraints, mask_deadline
from pdserve.engine.constraints.grammars import GrammarError
from pdserve.engine.scheduling import (
    EngineLimits,
    JobTable,
    Outcome,
    Plan,
    RequestState,
    Row,
    SampledToken,
    is_in_batch,
)
from pdserve.kernels.sampling_ops import AheadSampling, SampledTokens, SamplingOps, StreamSettings

# Hidden states and logits are arrays of the backend; the sampler only indexes and passes them.
Head = Callable[[Any], Any]  # hidden states [n, hidden] to float32 logits [n, vocab]
SCORED_BYTES = 64 << 20  # maximum size of the logits computed at a time for prompt scores
NOTHING = Outcome()
LATE = Outcome(is_late=True)
NOT_FINITE = SampledToken(-1, error="the logits are not finite")
NO_TOKEN = "the request's parameters allow no further token"


def plan_ahead(plan: Plan, jobs: JobTable) -> tuple[Plan, list[int]] | None:
    """Plan the step after the launched `plan`, whose sampled tokens are not known yet. Return the
    plan, and for each of its rows the index of its token among those that the launched plan
    samples.

    Returns None if the tokens must be known first: a waiting request or another sequence could run,
    a row is not a plain decode row (see `is_plain`), or blocks are short.
    """
    if plan.num_decode_rows < len(plan.rows) or (jobs.waiting and jobs.num_free_slots):
        return None
    live = [(index, row) for index, row in enumerate(plan.rows) if is_in_batch(row)]
    if len(live) < sum(len(job.sequences) for job in jobs.running):
        return None
    if not all(is_plain(row) for _, row in live):
        return None
    following = Plan([])
    indices: list[int] = []
    for index, (sequence, _, end, choices, _) in live:
        job = sequence.job
        if len(job.generated[choices[0]]) + 1 >= job.max_tokens:
            continue
        if end + 1 > sequence.writable_to:
            copies = jobs.extend(sequence, end + 1)
            if copies is None:
                return None
            assert not copies, "the previous step already writes into that block"
        following.rows.append(Row(sequence, end, end + 1, choices, end))
        indices.append(index)
    following.num_decode_rows = len(indices)
    return (following, indices) if indices else None


def is_plain(row: Row) -> bool:
    """Whether the row is a plain decode row: it computes one token of one choice, and its request
    needs neither log-probabilities, penalties nor constraints."""
    sequence = row.sequence
    if sequence.is_prefix or len(row.choices) != 1 or row.end - row.start > 1:
        return False
    return sequence.job.is_plain


class Sampler:
    """Samples the tokens of a step's rows. Its only state is the sampling state ("stream") of each
    choice, kept in RequestState.streams."""

    def __init__(self, limits: EngineLimits, ops: SamplingOps) -> None:
        self._limits = limits
        self._ops = ops
        self._ahead = ops if isinstance(ops, AheadSampling) else None

    def begin(
        self, rows: Seq[Row], hidden: Any, head: Head, unread: int = 0
    ) -> SampledTokens | None:
        """Launch the sampling of a step without waiting for it; `read` returns the tokens.

        Returns None and launches nothing if a row is not a plain decode row (see `is_plain`) or the
        backend cannot sample this way. `unread`: number of tokens per choice that are sampled
        already but not yet known to the host.
        """
        if self._ahead is None or not all(map(is_plain, rows)):
            return None
        logits = head(hidden)
        streams, num_generated = list[Any](), list[int]()
        for sequence, _, _, (choice,), _ in rows:
            job = sequence.job
            stream = job.streams.get(choice)
            streams.append(stream or self._stream(job, choice, logits.shape[-1]))
            num_generated.append(len(job.generated[choice]) + unread)
        return self._ahead.begin(logits, list(range(len(rows))), streams, num_generated)

    def read(self, tokens: SampledTokens) -> list[Outcome]:
        """Wait for the sampling that `begin` launched; return one outcome per row."""
        return [Outcome((SampledToken(t) if t >= 0 else NOT_FINITE,)) for t in tokens.read()]

    def sample(self, rows: Seq[Row], hidden: Any, head: Head) -> list[Outcome]:
        """Sample the tokens of all rows; return one outcome per row. `hidden`: hidden states
        [outputs, hidden] of all rows, row after row.

        Computes logits for sampling all at once; those for log-probabilities of prompt tokens are
        computed in parts, because they may need much memory.
        """
        if hidden is None:
            return [NOTHING for _ in rows]
        scores: dict[int, tuple[TokenLogprob, ...]] = {}
        last: list[int] = []  # outputs that are sampled from
        constrained: list[int] = []  # rows
        output = 0
        for i, (sequence, _, end, choices, first_output) in enumerate(rows):
            job = sequence.job
            if job.prompt_scores is not None:
                scores[i] = self._prompt_scores(rows[i], hidden, output, head)
            output += end - first_output
            if choices:
                last.append(output - 1)
                if job.constraints is not None:
                    constrained.append(i)
        if len(last) < output:
            hidden = hidden[last]
        logits = head(hidden)
        late = _late(rows, constrained)
        tokens = iter(self._sampled(rows, late, logits))
        outcomes: list[Outcome] = []
        for i, row in enumerate(rows):
            if i in late:
                outcomes.append(LATE)
            else:
                row_tokens = tuple(islice(tokens, len(row.choices)))
                outcomes.append(Outcome(row_tokens, scores.get(i, ())))
        return outcomes

    def _sampled(self, rows: Seq[Row], late: set[int], logits: Any) -> list[SampledToken]:
        """Return the sampled tokens of all rows in order, one per choice, except of rows in `late`.
        `logits` has one row per row that samples, late ones included."""
        outputs: list[int] = []
        streams: list[Any] = []
        generated: list[list[int]] = []
        # Few tokens need these: log-probabilities to return, and constraints.
        scored: dict[int, SamplingParams] = {}
        constrained: dict[int, tuple[RequestConstraints, int]] = {}
        masks: dict[int, Bitmask | None] = {}
        errors: dict[int, SampledToken] = {}
        output = -1
        for i, row in enumerate(rows):
            output += bool(row.choices)
            if i in late:
                continue
            job = row.sequence.job
            for choice in row.choices:
                index = len(outputs)
                if job.request.params.logprobs is not None:
                    scored[index] = job.request.params
                if job.constraints is not None:
                    constrained[index] = (job.constraints, choice)
                    try:
                        masks[index] = job.constraints.bitmask(choice)
                    except GrammarError as error:
                        errors[index] = SampledToken(-1, error=str(error), param=error.param)
                outputs.append(output)
                stream = job.streams.get(choice)
                streams.append(stream or self._stream(job, choice, logits.shape[-1]))
                generated.append(job.generated[choice])
        all_masks = [masks.get(index) for index in range(len(outputs))] if masks else None
        tokens = self._ops.sample(logits, outputs, streams, generated, all_masks)
        sampled = [SampledToken(token) if token >= 0 else NOT_FINITE for token in tokens]
        for i, (constraints, choice) in constrained.items():
            if tokens[i] < 0 and self._is_finite(logits[outputs[i] : outputs[i] + 1]):
                param = constraints.param(choice)
                sampled[i] = SampledToken(-1, error=NO_TOKEN, param=param, no_token=True)
        for i, params in scored.items():
            if tokens[i] >= 0:
                row_logits = logits[outputs[i] : outputs[i] + 1]
                count, extra_ids = params.logprobs or 0, params.logprob_token_ids
                (token_logprob,) = self._logprobs(row_logits, [tokens[i]], count, extra_ids)
                sampled[i] = SampledToken(tokens[i], token_logprob)
        for i, error_token in errors.items():
            sampled[i] = error_token
        return sampled

    def _logprobs(
        self, logits: Any, tokens: list[int], count: int, extra_ids: Seq[int] = ()
    ) -> list[TokenLogprob]:
        results = self._ops.logprobs(logits, tokens, count, extra_ids)
        return [TokenLogprob(logprob, top) for logprob, top in results]

    def _is_finite(self, logits: Any) -> bool:
        """Whether the highest logit of one row is finite. `logits`: [1, vocab]."""
        ((_, ((_, best),)),) = self._ops.logprobs(logits, [0], 1)
        return math.isfinite(best)

    def _prompt_scores(
        self, row: Row, hidden: Any, output: int, head: Head
    ) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of the prompt tokens that follow this row's tokens: start +
        1 to end, as far as the prompt goes. `output` is the index of the row's first hidden state
        in `hidden`."""
        job, sequence = row.sequence.job, row.sequence
        count = job.request.params.prompt_logprobs
        if count is None or not sequence.is_prefix:
            return ()
        tokens = sequence.ids[row.start + 1 : row.end + 1]
        size = max(1, SCORED_BYTES // (4 * self._limits.vocab_size))
        scores: list[TokenLogprob] = []
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            first = output + start
            scores += self._logprobs(head(hidden[first : first + len(part)]), part, count)
        return tuple(scores)

    def _stream(self, job: RequestState, choice: int, vocab: int) -> Any:
        """Make and keep the sampling state of a choice that has none yet; `vocab`: number of logits
        per token."""
        params = job.request.params
        stops = sorted(self._limits.stop_ids(params)) if params.min_tokens else ()
        settings = StreamSettings(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=job.request.seed,
            choice=choice,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            penalty_window=params.penalty_window,
            logit_bias=params.logit_bias,
            masked_ids=stops,
            min_tokens=params.min_tokens,
            prompt_ids=job.request.prompt_ids,
        )
        stream = job.streams[choice] = self._ops.stream(settings, vocab)
        return stream


def _late(rows: Seq[Row], constrained: Seq[int]) -> set[int]:
    """Return the indices of the constrained rows whose token masks are not ready in time. Waits for
    all masks of the step together, until `mask_deadline`."""
    late: set[int] = set()
    until_s = mask_deadline() if constrained else 0.0
    for i in constrained:
        constraints = rows[i].sequence.job.constraints
        if constraints is not None and not constraints.wait(rows[i].choices, until_s):
            late.add(i)
    return late
