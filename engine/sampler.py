"""Picks the next tokens of a step.

token = argmax(masked logits / T + gumbel(seed, choice, position, token id)), greedy = argmax; so it
is a function of the logits and of (seed, choice, position), whoever else is in the batch. Ties go
to the lowest id. A row without a finite best score (NaN logits) fails by itself.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine.candidates import candidates, filters
from pdserve.engine.limits import Limits
from pdserve.engine.logit_edits import LogitEdits
from pdserve.engine.logprobs import logprobs
from pdserve.engine.plan import Outcome, Pick, Row
from pdserve.engine.request import TokenLogprob
from pdserve.engine.sequence import Job
from pdserve.kernels.ops import Ops

Head = Callable[[Tensor], Tensor]  # hidden states [n, hidden] to float32 logits [n, vocab]

SCORED_BYTES = 64 << 20  # of the logits that prompt scores need at a time
GREEDY_BELOW = 1e-5  # a lower temperature is 0: logits / T would leave the range of float32


@dataclass(frozen=True, slots=True)
class _Draw:
    """One token to pick, from row `output` of the logits."""

    job: Job
    choice: int
    output: int
    edits: LogitEdits


class Sampler:
    """Stateless but for notes that it keeps on the jobs (Job.sampling)."""

    def __init__(self, limits: Limits, ops: Ops) -> None:
        self._limits = limits
        self._ops = ops

    def sample(self, rows: Seq[Row], hidden: Tensor | None, head: Head) -> list[Outcome]:
        """One outcome per row; `hidden` [outputs, hidden], the outputs of row after row.

        Only the tokens that choices sample from get their logits all at once.
        """
        if hidden is None:
            return [Outcome() for _ in rows]
        scores: list[tuple[TokenLogprob, ...]] = []
        last: list[int] = []  # outputs that are sampled from
        output = 0
        for row in rows:
            scores.append(self._prompt_scores(row, hidden[output:], head))
            output += row.num_outputs
            if row.choices:
                last.append(output - 1)
        if len(last) < output:
            hidden = hidden[torch.tensor(last, dtype=torch.int64, device=hidden.device)]
        logits = head(hidden)
        sampled = (row for row in rows if row.choices)
        draws = [
            _Draw(row.sequence.job, choice, i, self._edits(row.sequence.job, choice, logits))
            for i, row in enumerate(sampled)
            for choice in row.choices
        ]
        picks = iter(self._pick(draws, logits))
        return [
            Outcome(tuple(next(picks) for _ in row.choices), score)
            for row, score in zip(rows, scores, strict=True)
        ]

    def _pick(self, draws: list[_Draw], logits: Tensor) -> list[Pick]:
        if not draws:
            return []
        outputs = [d.output for d in draws]
        edited = [(i, d.edits) for i, d in enumerate(draws) if d.edits.active]
        scores = logits
        if edited or outputs != list(range(len(logits))):
            scores = logits[torch.tensor(outputs, device=logits.device)]  # a copy
        for i, edits in edited:
            edits.apply(scores[i])
        best = scores.argmax(dim=-1)  # NaN counts as the largest
        finite = scores.gather(1, best[:, None])[:, 0].isfinite().tolist()
        tokens: list[int] = best.tolist()
        self._draw_random(draws, scores, finite, tokens)
        found = self._chosen_logprobs(draws, logits, finite, tokens)
        return [
            Pick(token, found.get(i)) if ok else Pick(-1, error="the logits are not finite")
            for i, (token, ok) in enumerate(zip(tokens, finite, strict=True))
        ]

    def _draw_random(
        self, draws: list[_Draw], scores: Tensor, finite: list[bool], tokens: list[int]
    ) -> None:
        """Replaces the greedy tokens of rows with a temperature."""
        whole: list[int] = []
        for i, draw in enumerate(draws):
            params = draw.job.request.params
            if params.temperature < GREEDY_BELOW or not finite[i]:
                continue
            if not filters(params):
                whole.append(i)
                continue
            scaled = scores[i] / params.temperature
            ids = candidates(scaled, params)
            noise = self._ops.gumbel_at(*self._streams([draw], scores.device), ids[None])[0]
            tokens[i] = int(ids[(scaled[ids] + noise).argmax()])
        if whole:
            picked = [draws[i] for i in whole]
            heat = torch.tensor([d.job.request.params.temperature for d in picked])
            scaled = scores[whole] / heat[:, None].to(scores.device)
            drawn = self._ops.gumbel_argmax(scaled, *self._streams(picked, scores.device))
            for i, token in zip(whole, drawn.tolist(), strict=True):
                tokens[i] = token

    @staticmethod
    def _streams(draws: list[_Draw], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Seeds (as two's complement), choices and positions of the noise."""
        seeds = [d.job.request.seed for d in draws]
        return (
            torch.tensor([s - (1 << 64) if s >> 63 else s for s in seeds], device=device),
            torch.tensor([d.choice for d in draws], device=device),
            torch.tensor([len(d.job.generated[d.choice]) for d in draws], device=device),
        )

    @staticmethod
    def _chosen_logprobs(
        draws: list[_Draw], logits: Tensor, finite: list[bool], tokens: list[int]
    ) -> dict[int, TokenLogprob]:
        found: dict[int, TokenLogprob] = {}
        for i, draw in enumerate(draws):
            count = draw.job.request.params.logprobs
            if count is not None and finite[i]:
                row = logits[draw.output : draw.output + 1]
                (found[i],) = logprobs(row, [tokens[i]], count)
        return found

    def _prompt_scores(self, row: Row, hidden: Tensor, head: Head) -> tuple[TokenLogprob, ...]:
        """Of prompt tokens start + 1 .. end, as far as the prompt goes."""
        job, sequence = row.sequence.job, row.sequence
        count = job.request.params.prompt_logprobs
        if count is None or job.prompt_scores is None or not sequence.is_prefix:
            return ()
        tokens = sequence.ids[row.start + 1 : row.end + 1]
        size = max(1, SCORED_BYTES // (4 * self._limits.vocab_size))
        found: list[TokenLogprob] = []
        for start in range(0, len(tokens), size):
            some = tokens[start : start + size]
            found += logprobs(head(hidden[start : start + len(some)]), some, count)
        return tuple(found)

    def _edits(self, job: Job, choice: int, logits: Tensor) -> LogitEdits:
        edits = job.sampling.get(choice)
        if edits is None:
            stops = self._limits.stop_ids(job.request.params)
            edits = job.sampling[choice] = LogitEdits(job, choice, stops, logits)
        return edits
