"""The gateway's state of one request on a router, from which the request can be continued on
another router. Pure; the time is an argument.

Invariant: the recorded progress has exactly the token ids that were passed on to the client, in
order, so a reissued request continues where the client's answer stands. Events with an epoch other
than the current one are ignored, since they belong to an earlier issue.
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
    """A running request with its generated ids, its placement on workers and its deadlines.

    The constructor raises ServiceError INVALID_ARGUMENT if `start` is invalid for every worker.
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
        """Whether a worker has been chosen for the request at some time, so that it may be running
        there."""
        return self._placement is not None

    def routers_of_its_worker(self, addresses: Iterable[str]) -> list[str]:
        """Return those of the router addresses that the request's decode worker joins, in the order
        of its rendezvous hash. Empty if the request has no worker, or one that joins all
        routers."""
        if self._placement is None or self._placement_dropped or not self._join_routers:
            return []
        return rendezvous_order(self._placement.decode_incarnation, addresses)[: self._join_routers]

    def issue(self, now: float, given_back: bool = False) -> Start | None:
        """Return the Start message with which a router begins or continues the request; the epoch
        increases with each call.

        Returns None if all choices have ended or the deadline has passed. `given_back`: a router
        has returned the request for lack of a worker.
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
        """Record that the router refused the request without beginning it; keep the count of worker
        crashes that it reports."""
        self._crash_count = max(self._crash_count, failed.crash_count)

    def drop_placement(self) -> None:
        """Forget the worker of the request because no router knows it: the next issue has no
        placement, so any worker may continue with the request's ids."""
        self._placement_dropped = True

    def abort(self, choices: Sequence[int]) -> None:
        """Mark choices as ended by the gateway, all of them if `choices` is empty."""
        self._progress.abort(choices or range(len(self._progress.choices)))

    def take(self, event: RequestEvent) -> RequestEvent | None:
        """Record an event from the router and return the part of it that is new to the client; None
        if nothing is new or the event is of an earlier epoch.

        The event is changed in place. If tokens are missing before it, returns an event that ends
        the request with an error.
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
        """Record a token if it directly follows the recorded tokens of its choice; return whether
        it did."""
        if self.ended or choice.epoch != self._epoch:
            return False
        return self._progress.take_next(choice.choice, position, id_)

    def take_as_event(self, choice: NumberedChoice, position: int, id_: int) -> RequestEvent | None:
        """Record a token of a running choice like `take`; return it as an event, or None if it is
        not new."""
        if choice.epoch != self._epoch:
            return None
        tokens = Tokens(choice=choice.choice, position=position, ids=(id_,), epoch=choice.epoch)
        event = RequestEvent(tokens=tokens)
        return event if self.take_next(choice, position, id_) else self.take(event)

    def finish(self) -> RequestEvent | None:
        """End the request with a Finished event and return the event; for a request whose choices
        have all ended, but whose router was lost before it sent its own Finished."""
        if self.ended:
            return None
        self.ended = True
        return RequestEvent(finished=Finished(request=self.id, epoch=self._epoch))

    def fail(self, code: ErrorCode, message: str, retry_after_ms: int = 0) -> RequestEvent | None:
        """End the request with an error and return the Failed event; None if it has already
        ended."""
        if self.ended:
            return None
        self.ended = True
        failure = Failure(code=code, message=message, retry_after_ms=retry_after_ms)
        return RequestEvent(failed=Failed(request=self.id, epoch=self._epoch, failure=failure))

    def expired(self, now: float) -> bool:
        """Return whether the request's deadline has passed."""
        return self._deadline is not None and now >= self._deadline
