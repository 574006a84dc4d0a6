"""One request between the gateway and whichever router runs it; pure, time is an argument.

Invariant: `choices` holds exactly the ids that were handed on, in order, so that a re-issue
continues where the client is. Only events of the current epoch count.
"""

from collections.abc import Sequence

from pdserve.protos.common_pb2 import (
    ABORTED,
    FINISH_REASON_UNSPECIFIED,
    INTERNAL,
    ChoiceState,
    ErrorCode,
    Failed,
    Failure,
    Finished,
    Placement,
    PromptLogprobs,
    Start,
    Tokens,
)
from pdserve.protos.router_pb2 import RequestEvent


class ResumableRequest:
    """State of a live request: what it has, where it runs, how long it may take."""

    def __init__(self, start: Start, now: float) -> None:
        self.request = start.request
        self.ended = False
        self._template = Start()
        self._template.CopyFrom(start)
        del self._template.choices[:]
        self._deadline = now + start.remaining_ms / 1000 if start.remaining_ms else None
        self._queue_deadline = (
            now + start.queue_remaining_ms / 1000 if start.queue_remaining_ms else None
        )
        self._epoch = start.epoch
        self._issued = False
        self._num_scored = 0  # prompt tokens whose log-probabilities were handed on
        self._placement: Placement | None = None
        self._crash_count = start.crash_count
        self._choices = [ChoiceState() for _ in range(max(1, start.params.n))]
        for mine, given in zip(self._choices, start.choices, strict=False):
            mine.CopyFrom(given)

    @property
    def deadline(self) -> float | None:
        return self._deadline

    @property
    def placed(self) -> bool:
        """A worker has it, or had it: it may go on there."""
        return self._placement is not None

    def issue(self, now: float) -> Start | None:
        """The message that starts or continues the request; a higher epoch each time.

        None if every choice has ended or its deadline has passed: nothing is left to ask for.
        """
        if self._deadline is not None and now >= self._deadline:
            return None
        if all(choice.finish for choice in self._choices):
            return None
        if self._issued:
            self._epoch += 1
        self._issued = True
        start = Start()
        start.CopyFrom(self._template)
        start.epoch = self._epoch
        if any(choice.generated_ids or choice.finish for choice in self._choices):
            start.choices.extend(self._choices)
            start.queue_remaining_ms = 0  # it has had its first step
        elif self._queue_deadline is not None:
            start.queue_remaining_ms = max(1, int((self._queue_deadline - now) * 1000))
        if self._deadline is not None:
            start.remaining_ms = max(1, int((self._deadline - now) * 1000))
        if self._placement is not None:
            start.placement.CopyFrom(self._placement)
        start.crash_count = self._crash_count
        return start

    def abort(self, choices: Sequence[int]) -> None:
        """Mark choices (none named: all) as ended by the gateway."""
        for index in choices or range(len(self._choices)):
            if not self._choices[index].finish:
                self._choices[index].finish = ABORTED

    def take(self, event: RequestEvent) -> RequestEvent | None:
        """The part of an event that continues what the request has, or None."""
        kind = event.WhichOneof("event")
        if self.ended or kind is None:
            return None
        if kind == "tokens":
            return self._take_tokens(event.tokens)
        if kind == "placed":
            if event.placed.epoch != self._epoch:
                return None
            self._placement = event.placed.placement
            self._crash_count = event.placed.crash_count
        elif kind == "prompt_logprobs":
            return self._take_scores(event.prompt_logprobs)
        else:
            terminal = event.finished if kind == "finished" else event.failed
            if terminal.epoch != self._epoch:
                return None
            self.ended = True
        return event

    def _take_scores(self, scores: PromptLogprobs) -> RequestEvent | None:
        if scores.position > self._num_scored + 1:
            return self.fail(INTERNAL, "log-probabilities of the prompt were lost on the way")
        fresh = PromptLogprobs()
        fresh.CopyFrom(scores)
        skip = self._num_scored + 1 - scores.position
        del fresh.logprobs[:skip]
        if not fresh.logprobs:
            return None  # a re-issue answered twice
        fresh.position += skip
        self._num_scored += len(fresh.logprobs)
        if self._num_scored >= len(self._template.prompt_ids) - 1:
            self._template.params.ClearField("prompt_logprobs")
        return RequestEvent(prompt_logprobs=fresh)

    def _take_tokens(self, tokens: Tokens) -> RequestEvent | None:
        if tokens.epoch != self._epoch or tokens.choice >= len(self._choices):
            return None
        choice = self._choices[tokens.choice]
        known = len(choice.generated_ids)
        if choice.finish != FINISH_REASON_UNSPECIFIED:
            return None
        if tokens.position > known:
            return self.fail(INTERNAL, "tokens of the answer were lost on the way")
        skip = known - tokens.position
        if skip > len(tokens.ids) or (skip == len(tokens.ids) and not tokens.finish):
            return None
        if skip:
            fresh = Tokens()
            fresh.CopyFrom(tokens)
            del fresh.ids[:skip], fresh.logprobs[:skip]
            fresh.position = known
            tokens = fresh
        choice.generated_ids.extend(tokens.ids)
        choice.finish = tokens.finish
        return RequestEvent(tokens=tokens)

    def finish(self) -> RequestEvent | None:
        """End it here: its choices all ended, but the router that knew the rest is gone."""
        if self.ended:
            return None
        self.ended = True
        return RequestEvent(finished=Finished(request=self.request, epoch=self._epoch))

    def fail(self, code: ErrorCode, message: str, retry_after_ms: int = 0) -> RequestEvent | None:
        """End it here with an error, unless it has ended."""
        if self.ended:
            return None
        self.ended = True
        failure = Failure(code=code, message=message, retry_after_ms=retry_after_ms)
        return RequestEvent(failed=Failed(request=self.request, epoch=self._epoch, failure=failure))

    def expired(self, now: float) -> bool:
        return self._deadline is not None and now >= self._deadline
