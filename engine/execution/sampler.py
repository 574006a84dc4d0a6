"""Picks the next tokens of a step: which rows of the logits, and for whom.

How a token is picked is the backend's (kernels/reference/sampling.py): a function of the logits and
of the choice's stream, whoever else is in the batch. A row whose logits are not finite fails alone,
and so does one without a token that its constraints allow.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from pdserve.engine.api.request import SamplingParams, TokenLogprob
from pdserve.engine.constraints.bitmask import Bitmask
from pdserve.engine.constraints.grammars.compiled import GrammarError
from pdserve.engine.constraints.manager import RequestConstraints, mask_deadline
from pdserve.engine.scheduling.limits import EngineLimits
from pdserve.engine.scheduling.plan import Outcome, Pick, Row
from pdserve.engine.scheduling.request_state import RequestState
from pdserve.kernels.streams import SamplingOps, StreamSettings

# Hidden states and logits are arrays of the backend; here they are indexed and passed on.
Head = Callable[[Any], Any]  # hidden states [n, hidden] to float32 logits [n, vocab]

SCORED_BYTES = 64 << 20  # of the logits that prompt scores need at a time
NOTHING = Outcome()
LATE = Outcome(is_late=True)
NOT_FINITE = Pick(-1, error="the logits are not finite")
NO_TOKEN = "no token is left that the request's parameters allow"


class Sampler:
    """Stateless but for the streams that it keeps on the jobs (RequestState.streams)."""

    def __init__(self, limits: EngineLimits, ops: SamplingOps) -> None:
        self._limits = limits
        self._ops = ops

    def sample(self, rows: Seq[Row], hidden: Any, head: Head) -> list[Outcome]:
        """One outcome per row; `hidden` [outputs, hidden], the outputs of row after row.

        Only the tokens that choices sample from get their logits all at once.
        """
        if hidden is None:
            return [NOTHING for _ in rows]
        scores: dict[int, tuple[TokenLogprob, ...]] = {}
        last: list[int] = []  # outputs that are sampled from
        output = 0
        for i, row in enumerate(rows):
            if row.sequence.job.prompt_scores is not None:
                scores[i] = self._prompt_scores(row, hidden, output, head)
            output += row.end - row.first_output
            if row.choices:
                last.append(output - 1)
        if len(last) < output:
            hidden = hidden[last]
        logits = head(hidden)
        sampled = [row for row in rows if row.choices]
        late = self._late(sampled)
        # None of them is late in most steps, and to look up a row is to hash it.
        on_time = [(i, row) for i, row in enumerate(sampled) if not (late and row in late)]
        picks = self._pick(on_time, logits)
        outcomes: list[Outcome] = []
        taken = 0
        for i, row in enumerate(rows):
            if late and row in late:
                outcomes.append(LATE)
                continue
            end = taken + len(row.choices)
            outcomes.append(Outcome(tuple(picks[taken:end]), scores.get(i, ())))
            taken = end
        return outcomes

    def _late(self, rows: list[Row]) -> set[Row]:
        """Those without their masks; waits a little for these, once in a step."""
        late: set[Row] = set()
        until_s: float | None = None
        for row in rows:
            constraints = row.sequence.job.constraints
            if constraints is not None:
                until_s = until_s or mask_deadline()
                if not constraints.wait(row.choices, until_s):
                    late.add(row)
        return late

    def _pick(self, rows: list[tuple[int, Row]], logits: Any) -> list[Pick]:
        """One pick per choice of row after row, each with the index of its row of the logits."""
        outputs: list[int] = []
        streams: list[Any] = []
        generated: list[list[int]] = []
        masks: list[Bitmask | None] = []
        scored: list[tuple[int, SamplingParams]] = []  # pick, what is asked for
        errors: dict[int, Pick] = {}
        constrained: dict[int, tuple[RequestConstraints, int]] = {}
        for output, row in rows:
            job = row.sequence.job
            for choice in row.choices:
                if job.request.params.logprobs is not None:
                    scored.append((len(outputs), job.request.params))
                mask = None
                if job.constraints is not None:
                    constrained[len(outputs)] = (job.constraints, choice)
                    try:
                        mask = job.constraints.bitmask(choice)
                    except GrammarError as error:
                        errors[len(outputs)] = Pick(-1, error=str(error), param=error.param)
                masks.append(mask)
                outputs.append(output)
                streams.append(
                    job.streams.get(choice) or self._stream(job, choice, logits.shape[-1])
                )
                generated.append(job.generated[choice])
        tokens = self._ops.sample(
            logits, outputs, streams, generated, masks if constrained else None
        )
        picks = [Pick(token) if token >= 0 else NOT_FINITE for token in tokens]
        for i, (constraints, choice) in constrained.items():
            if tokens[i] < 0 and self._is_finite(logits[outputs[i] : outputs[i] + 1]):
                param = constraints.param(choice)
                picks[i] = Pick(-1, error=NO_TOKEN, param=param, no_token=True)
        for i, params in scored:
            if tokens[i] >= 0:
                row_logits = logits[outputs[i] : outputs[i] + 1]
                count, also = params.logprobs or 0, params.logprob_token_ids
                (found,) = self._logprobs(row_logits, [tokens[i]], count, also)
                picks[i] = Pick(tokens[i], found)
        for i, pick in errors.items():
            picks[i] = pick
        return picks

    def _logprobs(
        self, logits: Any, tokens: list[int], count: int, also: Seq[int] = ()
    ) -> list[TokenLogprob]:
        found = self._ops.logprobs(logits, tokens, count, also)
        return [TokenLogprob(own, top) for own, top in found]

    def _is_finite(self, logits: Any) -> bool:
        """Whether the best score of one row is finite."""
        ((_, ((_, best),)),) = self._ops.logprobs(logits, [0], 1)
        return math.isfinite(best)

    def _prompt_scores(
        self, row: Row, hidden: Any, output: int, head: Head
    ) -> tuple[TokenLogprob, ...]:
        """Of prompt tokens start + 1 .. end, as far as the prompt goes; `output` is the row's."""
        job, sequence = row.sequence.job, row.sequence
        count = job.request.params.prompt_logprobs
        if count is None or not sequence.is_prefix:
            return ()
        tokens = sequence.ids[row.start + 1 : row.end + 1]
        size = max(1, SCORED_BYTES // (4 * self._limits.vocab_size))
        found: list[TokenLogprob] = []
        for start in range(0, len(tokens), size):
            some = tokens[start : start + size]
            at = output + start
            found += self._logprobs(head(hidden[at : at + len(some)]), some, count)
        return tuple(found)

    def _stream(self, job: RequestState, choice: int, vocab: int) -> Any:
        """The stream of a choice that has none yet."""
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
            logit_bias=params.logit_bias,
            masked_ids=stops,
            min_tokens=params.min_tokens,
            prompt_ids=job.request.prompt_ids,
        )
        stream = job.streams[choice] = self._ops.stream(settings, vocab)
        return stream
