"""Applies the outcomes of a computed step to its requests: appends tokens, and forks and ends
choices. Pure.

The choices of a request share one sequence until the last token of the prefix (prefix_ids) has run;
then every choice continues as a separate sequence that shares the prefix's blocks.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.api import (
    Event,
    Finished,
    FinishReason,
    NewTokens,
    Pooled,
    PrefillComputed,
    PromptScored,
    RequestFailed,
)
from pdserve.engine.scheduling.job_table import JobTable
from pdserve.engine.scheduling.limits import EngineLimits
from pdserve.engine.scheduling.plan import Outcome, Plan, Row, SampledToken
from pdserve.engine.scheduling.request_state import PooledState, RequestState, Sequence


def is_in_batch(row: Row) -> bool:
    """Whether the row's sequence is still in the batch, as it was when the step was planned;
    otherwise its choice or request has left meanwhile."""
    sequence = row.sequence
    return sequence.slot >= 0 and sequence in sequence.job.sequences


class StepProgress:
    """Applies to requests what steps computed and sampled. Its methods return the events to
    send."""

    def __init__(
        self,
        jobs: JobTable,
        limits: EngineLimits,
        score: Callable[[NDArray[np.float32]], float] | None = None,
    ) -> None:
        """`score`: makes the score of a reranker from the pooled state of a prompt."""
        self._jobs = jobs
        self._limits = limits
        self._score = score
        self.generated_tokens = 0

    def end_complete(self, job: RequestState) -> list[Event]:
        """End the choices of a request that are already complete. Called when a request arrives, as
        it may bring generated tokens from another engine, and when its grammar has caught up with
        generated tokens and may show a choice to be complete."""
        events: list[Event] = []
        if not job.request.generates:
            return events
        for choice in job.unfinished:
            reason = self._finish_reason(job, choice)
            if reason is not None:
                events += self._finish(job, choice, reason)
                self._drop(job, choice)
        if not job.unfinished:
            events += self._end(job)
        return events

    def apply(self, plan: Plan, outcomes: Seq[Outcome]) -> list[Event]:
        """Apply the outcomes of a computed step, one per row, to the requests of these rows.
        Ignores the outcome of a row whose sequence has left the batch since the step was
        planned."""
        events: list[Event] = []
        for row, outcome in zip(plan.rows, outcomes, strict=True):
            if is_in_batch(row):
                self._apply_row(row, outcome, events)
        return events

    def abort(self, job: RequestState, choices: Seq[int]) -> list[Event]:
        """Abort these choices of a request, or the whole request if `choices` is empty."""
        events: list[Event] = []
        for choice in choices or job.unfinished:
            if job.finish[choice] is None and not job.request.prefill_only:
                events += self._finish(job, choice, FinishReason.ABORTED)
                self._drop(job, choice)
        if job.request.prefill_only:
            self._jobs.end(job)
        elif not job.unfinished:
            events += self._end(job)
        return events

    def fail(
        self, job: RequestState, message: str, param: str = "", is_overload: bool = False
    ) -> list[Event]:
        """End the whole request with an error. `param`: the request field at fault, set if the
        client caused the error; `is_overload`: the machine was too busy."""
        self._jobs.end(job)
        return [RequestFailed(job.key, message, param, is_overload)]

    def _apply_row(self, row: Row, outcome: Outcome, events: list[Event]) -> None:
        sequence = row.sequence
        job = sequence.job
        tokens = outcome.tokens
        if not sequence.is_prefix and len(tokens) == 1 and not tokens[0].error:  # common case
            self._jobs.advance(sequence, row.end)
            event = self._append(sequence, row.choices[0], tokens[0])
            events.append(event)
            if event.finish is not None and not job.unfinished:
                events += self._end(job)
            return
        if outcome.is_late:
            return
        self._jobs.advance(sequence, row.end)
        if job.prompt_scores is not None:
            job.prompt_scores[row.start :] = outcome.scores  # again after a preemption
        if job.pooled is not None and outcome.states is not None:
            job.pooled.take(outcome.states, row.first_output)
        if sequence.is_prefix:
            events.append(PrefillComputed(job.key, row.end, row.end == len(sequence.ids)))
        if row.end < len(sequence.ids):
            return
        if sequence.is_prefix:
            if job.request.prefill_only:
                self._jobs.hold(job)
                return
            if job.pooled is not None:
                events += self._pool(job, job.pooled)
                return
            if job.prompt_scores is not None:
                events.append(PromptScored(job.key, tuple(job.prompt_scores)))
                job.prompt_scores = None
            self._fork(job, sequence)
        failed = [token for token in tokens if token.error]
        for token in failed:
            # A choice whose constraints allow no token ends alone if others remain.
            if not token.no_token or not token.param or len(failed) == job.request.params.n:
                # Its KV may be wrong: requests that would share it must not fail too.
                if not token.param:
                    self._jobs.forget(job)
                events += self.fail(job, token.error, token.param)
                return
        ended = False
        for choice, token in zip(row.choices, tokens, strict=True):
            if job.finish[choice] is None:
                if token.error:
                    new = self._finish(job, choice, FinishReason.LENGTH)
                    self._drop(job, choice)
                else:
                    branch = next(s for s in job.sequences if s.choices == (choice,))
                    new = [self._append(branch, choice, token)]
                ended |= job.finish[choice] is not None
                events += new
        if ended and not job.unfinished:
            events += self._end(job)

    def _pool(self, job: RequestState, pooled: PooledState) -> list[Event]:
        """End an embedding request whose prompt is computed, with its Pooled event; fail it if the
        pooled state or the score is not finite."""
        values = pooled.values()
        if values is None:
            self._jobs.forget(job)  # so that no other request shares KV that may be wrong
            return self.fail(job, "the hidden states are not finite")
        if self._score is not None:
            score = self._score(np.array(values, np.float32))
            if not math.isfinite(score):
                return self.fail(job, "the score is not finite")
            values = (score,)
        return [Pooled(job.key, values), *self._end(job)]

    def _fork(self, job: RequestState, prefix: Sequence) -> None:
        """Continue every unfinished choice from the computed prefix as a sequence; the first choice
        takes over the sequence of the prefix."""
        prefix.is_prefix = False
        first, *others = job.unfinished
        for choice in others:
            self._jobs.fork(prefix, choice)
        prefix.ids = job.branch_ids(first)
        prefix.choices = (first,)

    def _append(self, sequence: Sequence, choice: int, sampled: SampledToken) -> NewTokens:
        """Append the sampled token to a choice and to its sequence; end the choice if the token
        completes it."""
        job, token = sequence.job, sampled.token
        ids = job.generated[choice]
        ids.append(token)
        self.generated_tokens += 1
        sequence.ids.append(token)
        if job.constraints is not None:
            job.constraints.accept_token(choice, token)
        reason = self._finish_reason(job, choice)
        if reason is not None:
            job.finish[choice] = reason
            self._jobs.end_sequence(sequence)
        logprobs = () if sampled.logprob is None else (sampled.logprob,)
        return NewTokens(job.key, choice, len(ids) - 1, (token,), logprobs, reason)

    def _finish_reason(self, job: RequestState, choice: int) -> FinishReason | None:
        """Return why a choice has ended. Return None if it has not ended, or if its grammar has not
        yet accepted all generated tokens, so that the reason is not known."""
        reason = self._limits.finish_of(job.generated[choice], job.request.params, job.max_tokens)
        constraints = job.constraints
        if reason is FinishReason.STOP or constraints is None:
            return reason
        if constraints.is_behind(choice):
            return None
        return FinishReason.STOP if constraints.is_terminated(choice) else reason

    def _finish(self, job: RequestState, choice: int, reason: FinishReason) -> list[Event]:
        """End a choice for this reason without a further token."""
        job.finish[choice] = reason
        return [NewTokens(job.key, choice, len(job.generated[choice]), (), (), reason)]

    def _drop(self, job: RequestState, choice: int) -> None:
        """Free the sequence of a choice that ended without a token, or its slot if the choice still
        shares the prefix."""
        for sequence in list(job.sequences):
            if sequence.is_prefix:
                sequence.choices = tuple(c for c in sequence.choices if c != choice)
                self._jobs.return_slot(job)
            elif sequence.choices == (choice,):
                self._jobs.end_sequence(sequence)

    def _end(self, job: RequestState) -> list[Event]:
        self._jobs.end(job)
        return [Finished(job.key, job.cached_tokens)]
