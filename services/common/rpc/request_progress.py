"""Tracks one request's Start message and the output generated so far, so that another worker can
continue the request. Pure.

Token ids are accepted only if they continue a choice, so a repeated or overlapping message adds
nothing twice. The router keeps a RequestProgress for each request that it runs.
"""

from array import array
from collections.abc import Sequence

from pdserve.engine.api import MAX_CHOICES
from pdserve.protos import common_pb2 as pb
from pdserve.services.common.errors import ServiceError


class LostTokens(Exception):
    """Raised if a message's token ids or log-probabilities do not follow the ones received so far:
    earlier ones were lost."""


class RequestProgress:
    """A request's Start message and the token ids that each of its choices has generated.

    Can make a Start at any time, with which any worker continues the request. The constructor takes
    over and changes the Start that it receives. It raises ServiceError INVALID_ARGUMENT if every
    worker would refuse the request.
    """

    def __init__(self, start: pb.Start, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise ServiceError(pb.INVALID_ARGUMENT, "the prompt is empty", "prompt_ids")
        if start.params.n > MAX_CHOICES:
            raise ServiceError(pb.INVALID_ARGUMENT, f"n must be at most {MAX_CHOICES}", "n")
        if start.pool and start.params.n > 1:
            raise ServiceError(pb.INVALID_ARGUMENT, "n must be 1 for an embedding", "n")
        if len(start.choices) not in (0, max(1, start.params.n)):
            raise ServiceError(
                pb.INVALID_ARGUMENT,
                "choices must be empty or have n entries, one for each choice",
                "choices",
            )
        self.start = start  # without ids and choices
        self.prompt_ids = list(prompt_ids)
        self._choices = [pb.ChoiceState() for _ in range(max(1, start.params.n))]
        for state, initial_state in zip(self._choices, start.choices, strict=False):
            state.CopyFrom(initial_state)
        # The position of each choice's next id, or -1 once it has ended.
        self._next = [
            -1 if choice.finish else len(choice.generated_ids) for choice in self._choices
        ]
        self._added = [array("I") for _ in self._choices]  # ids not yet in `_choices`
        self._num_scored = 0  # prompt tokens whose log-probabilities were taken
        del self.start.choices[:]
        del self.start.prompt_ids[:]

    @property
    def choices(self) -> list[pb.ChoiceState]:
        """The state of each choice: generated ids and finish reason. Callers must not change it."""
        for choice, added in zip(self._choices, self._added, strict=True):
            if added:
                choice.generated_ids.extend(added)
                del added[:]
        return self._choices

    def take(self, tokens: pb.Tokens) -> pb.Tokens | None:
        """Add the ids of a Tokens message to their choice. Returns the message, without ids that
        were received before, or None if nothing in it is new.

        Changes the message. Raises LostTokens if ids between the known ones and the message are
        missing.
        """
        if tokens.choice >= len(self.choices):
            return None
        choice = self.choices[tokens.choice]
        num_ids = len(choice.generated_ids)
        if choice.finish:
            return None
        if tokens.position > num_ids:
            raise LostTokens(
                f"tokens were lost: choice {tokens.choice} has {num_ids} ids, but the next message "
                f"starts at position {tokens.position}"
            )
        skip = num_ids - tokens.position
        if skip >= len(tokens.ids) and not tokens.finish:
            return None
        if skip:
            del tokens.ids[:skip]
            del tokens.logprobs[:skip]
            tokens.position = num_ids
        choice.generated_ids.extend(tokens.ids)
        choice.finish = tokens.finish
        self._next[tokens.choice] = -1 if tokens.finish else len(choice.generated_ids)
        return tokens

    def take_next(self, choice: int, position: int, id_: int) -> bool:
        """Add one token id to a choice if `position` is the choice's next one; return whether it
        was added."""
        if choice >= len(self._next) or self._next[choice] != position:
            return False
        self._added[choice].append(id_)
        self._next[choice] = position + 1
        return True

    def take_scores(self, scores: pb.PromptLogprobs) -> pb.PromptLogprobs | None:
        """Like `take`, for a message with log-probabilities of the prompt's tokens. Once all are
        received, a later Start no longer requests them."""
        if not self.start.params.HasField("prompt_logprobs"):
            return None
        if scores.position > self._num_scored + 1:
            raise LostTokens(
                f"log-probabilities were lost: those of {self._num_scored} prompt tokens were "
                f"received, but the next message starts at token {scores.position}"
            )
        skip = self._num_scored + 1 - scores.position
        if skip >= len(scores.logprobs):
            return None
        del scores.logprobs[:skip]
        scores.position += skip
        self._num_scored += len(scores.logprobs)
        if self._num_scored >= len(self.prompt_ids) - 1:
            self.start.params.ClearField("prompt_logprobs")
        return scores

    def take_embedding(self, embedding: pb.Embedding) -> pb.Embedding | None:
        """Complete the request with its embedding, and return it; return None if the request is
        already complete or does not ask for an embedding."""
        if not self.start.pool or self.complete:
            return None
        self._finish(0, pb.STOP)
        return embedding

    def abort(self, choices: Sequence[int]) -> None:
        """Mark these choices as aborted by the client; a choice that has ended keeps its finish
        reason."""
        for index in choices:
            if index < len(self.choices) and not self.choices[index].finish:
                self._finish(index, pb.ABORTED)

    def _finish(self, choice: int, reason: pb.FinishReason) -> None:
        self.choices[choice].finish = reason
        self._next[choice] = -1

    @property
    def complete(self) -> bool:
        """Whether every choice of the request has ended, that is, has a finish reason."""
        return all(choice.finish for choice in self.choices)

    @property
    def begun(self) -> bool:
        """Whether any choice has generated token ids."""
        return any(choice.generated_ids for choice in self.choices)

    @property
    def num_unfinished(self) -> int:
        """The number of choices that have no finish reason yet."""
        return sum(not choice.finish for choice in self.choices)

    @property
    def may_go_remote(self) -> bool:
        """Whether a prefill worker may compute the prompt. A decode worker must do so if the
        request asks for log-probabilities of the prompt or for an embedding, since these result
        from that computation."""
        return not (self.start.pool or self.start.params.HasField("prompt_logprobs"))

    def prefix_ids(self) -> list[int]:
        """Return the token ids whose KV a worker needs in order to continue: the prompt, and if
        exactly one choice is unfinished, the ids that it has generated. The last id needs no KV
        before the first decode step, since it is that step's input."""
        unfinished = [choice for choice in self.choices if not choice.finish]
        if len(unfinished) == 1:
            return [*self.prompt_ids, *unfinished[0].generated_ids]
        return self.prompt_ids

    def to_start(self, epoch: int, crash_count: int, remaining_ms: int, queue_ms: int) -> pb.Start:
        """Make the Start message of the next attempt, with the ids generated so far but without
        those of the prompt, which may be sent in parts.

        More than some 60,000 generated ids make the message larger than the usual 256 KiB; gRPC's
        limit of 4 MiB is enough for a million.
        """
        start = pb.Start()
        start.CopyFrom(self.start)
        start.epoch = epoch
        start.crash_count = crash_count
        start.remaining_ms = remaining_ms
        start.queue_remaining_ms = queue_ms
        start.ClearField("placement")
        if self.begun or any(choice.finish for choice in self.choices):
            start.choices.extend(self.choices)
        return start


def remaining_ms(deadline: float | None, now: float) -> int:
    """Return the milliseconds from `now` until a deadline, at least 1; 0 if there is no deadline,
    as the Start message encodes it."""
    return 0 if deadline is None else max(1, int((deadline - now) * 1000))
