"""One request between the gateway and the router that runs it; pure, time is an argument.

Invariant: its progress holds exactly the ids that were passed on, in order, so that a reissued
request continues at the client's position. Only events of the current epoch count.
"""

from collections.abc import Iterable, Sequence

from pdserve.protos.common_pb2 import (
    INTERNAL,
    ErrorCode,
    Failed,
    Failure,
    Finished,
    Placement,
    Start,
    Tokens,
)
from pdserve.protos.router_pb2 import RequestEvent
from pdserve.services.common.discovery import rendezvous_order
from pdserve.services.common.rpc import LostTokens, NumberedChoice, RequestProgress, remaining_ms


class ResumableRequest:
    """A live request: its ids, placement and deadlines.

    The constructor raises ServiceError INVALID_ARGUMENT if no worker could take the Start.
    """

    def __init__(self, start: Start, now: float) -> None:
        self.id = start.request
        self.model = start.model
        self.ended = False
        copy = Start()
        copy.CopyFrom(start)
        self._progress = RequestProgress(copy, start.prompt_ids)
        self._deadline = now + start.remaining_ms / 1000 if start.remaining_ms else None
        self._queue_deadline = (
            now + start.queue_remaining_ms / 1000 if start.queue_remaining_ms else None
        )
        self._epoch = start.epoch
        self._issued = False
        self._placement: Placement | None = None
        self._join_routers = 0  # how many routers its worker joins; 0: all
        self._placement_dropped = False  # whether its placement is dropped
        self._crash_count = start.crash_count

    @property
    def deadline(self) -> float | None:
        return self._deadline

    @property
    def placed(self) -> bool:
        """Whether a worker has or had the request, so that it may continue there."""
        return self._placement is not None

    def routers_of_its_worker(self, addresses: Iterable[str]) -> list[str]:
        """The routers that the request's worker joins by rendezvous hash, the first choice first;
        empty if the request has no worker, or one that joins all routers."""
        if self._placement is None or self._placement_dropped or not self._join_routers:
            return []
        return rendezvous_order(self._placement.decode_boot, addresses)[: self._join_routers]

    def issue(self, now: float, given_back: bool = False) -> Start | None:
        """Return the message that starts or continues the request; it has a higher epoch each time.

        None if every choice has ended or the deadline has passed.
        """
        if self.expired(now) or self._progress.complete:
            return None
        if self._issued:
            self._epoch += 1
        self._issued = True
        start = self._progress.to_start(
            self._epoch, self._crash_count, remaining_ms(self._deadline, now), 0
        )
        if not start.choices:  # it has not had its first step yet
            start.queue_remaining_ms = remaining_ms(self._queue_deadline, now)
        start.prompt_ids.extend(self._progress.prompt_ids)
        start.given_back = given_back
        if self._placement is not None and not self._placement_dropped:
            start.placement.CopyFrom(self._placement)
        return start

    def refused(self, failed: Failed) -> None:
        """Record that a router refused the last issue of the request without beginning it."""
        self._crash_count = max(self._crash_count, failed.crash_count)

    def drop_placement(self) -> None:
        """Drop the placement, since no router knows its worker: any other worker may continue with
        the request's ids."""
        self._placement_dropped = True

    def abort(self, choices: Sequence[int]) -> None:
        """Mark choices as ended by the gateway; all if none are given."""
        self._progress.abort(choices or range(len(self._progress.choices)))

    def take(self, event: RequestEvent) -> RequestEvent | None:
        """The part of an event that continues the request, or None.

        Changes the event. A gap in the output ends the request with an error.
        """
        kind = event.WhichOneof("event")
        if self.ended or kind is None:
            return None
        try:
            if kind == "prompt_logprobs":
                scores = self._progress.take_scores(event.prompt_logprobs)
                return event if scores is not None else None
            if getattr(event, kind).epoch != self._epoch:
                return None
            if kind == "tokens":
                return event if self._progress.take(event.tokens) is not None else None
            if kind == "embedding":
                embedding = self._progress.take_embedding(event.embedding)
                return event if embedding is not None else None
        except LostTokens:
            return self.fail(INTERNAL, "part of the answer was lost in transit")
        if kind == "placed":
            self._placement, self._placement_dropped = event.placed.placement, False
            self._join_routers = event.placed.join_routers
            self._crash_count = event.placed.crash_count
        else:
            self.ended = True
        return event

    def take_next(self, choice: NumberedChoice, position: int, id_: int) -> bool:
        """Take a token if it is the next of its choice; return whether it was."""
        if self.ended or choice.epoch != self._epoch:
            return False
        return self._progress.take_next(choice.choice, position, id_)

    def take_as_event(self, choice: NumberedChoice, position: int, id_: int) -> RequestEvent | None:
        """Take a token of an unfinished choice as an event, like `take`."""
        if choice.epoch != self._epoch:
            return None
        tokens = Tokens(choice=choice.choice, position=position, ids=(id_,), epoch=choice.epoch)
        event = RequestEvent(tokens=tokens)
        return event if self.take_next(choice, position, id_) else self.take(event)

    def finish(self) -> RequestEvent | None:
        """End the request here: its choices have all ended, but the router with its Finished is
        lost."""
        if self.ended:
            return None
        self.ended = True
        return RequestEvent(finished=Finished(request=self.id, epoch=self._epoch))

    def fail(self, code: ErrorCode, message: str, retry_after_ms: int = 0) -> RequestEvent | None:
        """End the request here with an error, unless it has ended."""
        if self.ended:
            return None
        self.ended = True
        failure = Failure(code=code, message=message, retry_after_ms=retry_after_ms)
        return RequestEvent(failed=Failed(request=self.id, epoch=self._epoch, failure=failure))

    def expired(self, now: float) -> bool:
        """Whether its deadline has passed."""
        return self._deadline is not None and now >= self._deadline
