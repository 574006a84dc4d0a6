"""Picks the next tokens of a step: which rows of the logits, and for whom.

How a token is picked is the backend's (kernels/reference/sampling.py): a function of the logits and
of the choice's stream, whoever else is in the batch. A row whose logits are not finite fails alone.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from pdserve.engine.api.request import TokenLogprob
from pdserve.engine.scheduling.limits import EngineLimits
from pdserve.engine.scheduling.plan import Outcome, Pick, Row
from pdserve.engine.scheduling.request_state import RequestState
from pdserve.kernels.streams import SamplingOps, StreamSettings

# Hidden states and logits are arrays of the backend; here they are indexed and passed on.
Head = Callable[[Any], Any]  # hidden states [n, hidden] to float32 logits [n, vocab]

SCORED_BYTES = 64 << 20  # of the logits that prompt scores need at a time
NOTHING = Outcome()
NOT_FINITE = Pick(-1, error="the logits are not finite")


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
        picks = self._pick([row for row in rows if row.choices], head(hidden))
        outcomes: list[Outcome] = []
        taken = 0
        for i, row in enumerate(rows):
            end = taken + len(row.choices)
            outcomes.append(Outcome(tuple(picks[taken:end]), scores.get(i, ())))
            taken = end
        return outcomes

    def _pick(self, rows: list[Row], logits: Any) -> list[Pick]:
        """One pick per choice of row after row; each row has a row of the logits."""
        outputs: list[int] = []
        streams: list[Any] = []
        generated: list[list[int]] = []
        scored: list[tuple[int, int]] = []  # pick, number of candidates to name
        for output, row in enumerate(rows):
            job = row.sequence.job
            count = job.request.params.logprobs
            for choice in row.choices:
                if count is not None:
                    scored.append((len(outputs), count))
                outputs.append(output)
                streams.append(
                    job.streams.get(choice) or self._stream(job, choice, logits.shape[-1])
                )
                generated.append(job.generated[choice])
        tokens = self._ops.sample(logits, outputs, streams, generated)
        picks = [Pick(token) if token >= 0 else NOT_FINITE for token in tokens]
        for i, count in scored:
            if tokens[i] >= 0:
                row_logits = logits[outputs[i] : outputs[i] + 1]
                (found,) = self._logprobs(row_logits, [tokens[i]], count)
                picks[i] = Pick(tokens[i], found)
        return picks

    def _logprobs(self, logits: Any, tokens: list[int], count: int) -> list[TokenLogprob]:
        return [TokenLogprob(own, best) for own, best in self._ops.logprobs(logits, tokens, count)]

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
