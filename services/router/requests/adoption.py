"""How a flow goes on with an attempt that another session began: nothing is computed twice.

A Start that names an attempt (its gateway lost a router, or its session with this one) begins as
SEEKING: the attempt may be parked at its decode worker. Once that is there it is asked (RESUMING).
A flow that has lost its own session with a decode worker that lives does the same.
With a ticket the KV is still awaited: PrefillStart is said again, to a worker that knows it already
or never heard of it. Without its worker, or answered Gone, the request is placed anew.

Issued again to the router that has it, a request ends here as the old flow and goes on as the new.
"""

from typing import TYPE_CHECKING

from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire
from pdserve.services.router.fleet.fleet import Worker
from pdserve.services.router.requests import commands
from pdserve.services.router.requests.effects import Attempt, Stage

if TYPE_CHECKING:
    from pdserve.services.host.request_progress import RequestProgress
    from pdserve.services.router.requests.request import RoutedRequest

SEEK_S = 5.0  # for its worker to join a router that has just started, or to be reached again
MAX_TURNS = 256  # sessions that the tries of one Start may outlive; then each loss is a failed try


def claim(flow: "RoutedRequest") -> int:
    """A flow's epoch towards decode: higher with each re-issue, and with each session between."""
    return flow.epoch * MAX_TURNS + flow.turn


def outlives(flow: "RoutedRequest", attempt: Attempt, worker: Worker, now: float) -> bool:
    """The session with a worker that lives is lost: whether the attempt goes on all the same.

    Decode parks what it has admitted, and prefill does not mind.
    """
    if attempt.decode is worker and flow.stage is not Stage.ADMITTING:
        flow.stage, flow.sought = Stage.SEEKING, now
        return flow.turn + 1 < MAX_TURNS
    if attempt.prefill is worker and attempt.ticket is not None:
        attempt.unheard = True
        return True
    return False


def seek(flow: "RoutedRequest", now: float) -> None:
    """Ask the decode worker of the placement if it is there; place anew if it will not be."""
    flow.stage = Stage.SEEKING
    boot = flow.placement.decode_boot
    worker = flow.board.find(boot)
    if worker is not None:
        attempt = flow.attempt
        if attempt is None:
            attempt = Attempt(flow.placement.attempt, worker, None, [], now, now, answered=True)
            attempt.adopted = True
            flow.attempt = attempt
            flow.board.opened(flow, attempt, now)
        else:
            flow.turn += 1
            attempt.asked = now
        flow.stage = Stage.RESUMING
        ask = commands.resume(attempt.id, claim(flow), flow.answer.choices)
        flow.board.to_decode(worker, ask)
    elif now >= flow.sought + SEEK_S or not flow.board.may_join(boot, now):
        flow.retry("its decode worker is not there", now)


def resumed(flow: "RoutedRequest", message: wire.Resumed, now: float) -> None:
    """The attempt is this flow's, again or for the first time: what the gateway lacks follows."""
    attempt = flow.attempt
    if attempt is None or flow.stage is not Stage.RESUMING or message.epoch != claim(flow):
        return
    flow.board.adopted(flow)
    attempt.follows = message.follows
    flow.emit_placed(attempt.prefill)
    leave_out_aborted(flow, attempt)
    if not message.HasField("ticket"):
        if attempt.adopted:
            flow.counted = True  # by the router before
        flow.stage = Stage.RUNNING
        return
    flow.stage = Stage.PREFILLING
    if attempt.adopted:
        attempt.ids = flow.answer.prefix_ids()[:-1]
        attempt.ticket, attempt.prefill_boot = message.ticket, message.prefill_boot
    if attempt.unsaid:
        seek_prefill(flow, attempt, message.ticket, now)


def leave_out_aborted(flow: "RoutedRequest", attempt: Attempt) -> None:
    """Say which choices its client has cancelled: the attempt may not have heard of them."""
    aborted = [i for i, c in enumerate(flow.answer.choices) if c.finish == pb.ABORTED]
    if aborted:
        cancel = wire.CancelAttempt(attempt=attempt.id, choices=aborted)
        flow.board.to_decode(attempt.decode, wire.DecodeCommand(cancel=cancel))


def seek_prefill(flow: "RoutedRequest", attempt: Attempt, ticket: wire.Ticket, now: float) -> None:
    """Say PrefillStart again if the prefill worker is there; try anew if it will not be."""
    boot = attempt.prefill_boot if attempt.prefill is None else attempt.prefill.boot
    worker = flow.board.find(boot)
    if worker is not None:
        flow.start_prefill(attempt, worker, ticket, now)
    elif not flow.board.may_join(boot, now):
        flow.num_prefill_failures += 1
        flow.retry("its prefill worker is not there", now)


def hand_on(flow: "RoutedRequest", start: pb.Start, answer: "RequestProgress") -> Attempt | None:
    """The same request was issued again, under a higher epoch: end without an event.

    An attempt that decode has admitted goes on under the new flow, which will find it. One that it
    has yet to answer is returned: the new flow takes it over, and the answer with it.
    """
    start.crash_count = max(start.crash_count, flow.crash_count)
    attempt, asking = flow.attempt, flow.stage is Stage.ADMITTING
    takes_over = asking and answer.choices == flow.answer.choices
    if attempt is None or (asking and not takes_over):
        flow.cancel_attempt()
    else:
        start.placement.CopyFrom(flow.placement)
    if takes_over:
        flow.attempt = None
    else:
        flow.close_attempt()
    flow.stage = Stage.ENDED
    return attempt if takes_over else None


def take_over(flow: "RoutedRequest", attempt: Attempt) -> None:
    """Wait for decode's answer to what an earlier flow of the request has asked."""
    flow.attempt = attempt
    flow.num_attempts = 1
    flow.stage = Stage.ADMITTING
