"""How a flow goes on with an attempt that another session began: nothing is computed twice.

A Start that names an attempt (its gateway lost a router, or its session with this one) begins as
SEEKING: the attempt may be parked at its decode worker. Once that is there it is asked (RESUMING).
With a ticket the KV is still awaited: PrefillStart is said again, to a worker that knows it already
or never heard of it. Without its worker, or answered Gone, the request is placed anew.

Issued again to the router that has it, a request ends here as the old flow and goes on as the new.
"""

import logging
from typing import TYPE_CHECKING

from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire
from pdserve.services.router import commands
from pdserve.services.router.switchboard import Attempt, Stage

if TYPE_CHECKING:
    from pdserve.services.router.answer import Answer
    from pdserve.services.router.flow import Flow

log = logging.getLogger(__name__)

SEEK_S = 5.0  # for its worker to join a router that has just started


def seek(flow: "Flow", now: float) -> None:
    """Ask the decode worker of the placement if it is there; place anew if it will not be."""
    flow.stage = Stage.SEEKING
    boot = flow.placement.decode_boot
    worker = flow.board.find(boot)
    if worker is not None:
        begun = Attempt(flow.placement.attempt, worker, None, [], now, now, answered=True)
        begun.adopted = True
        flow.attempt = begun
        flow.stage = Stage.RESUMING
        flow.board.opened(flow, begun, now)
        ask = commands.resume(begun.id, flow.epoch, flow.answer.choices)
        flow.board.to_decode(worker, ask)
    elif now >= flow.arrived + SEEK_S or not flow.board.may_join(boot, now):
        log.info("its decode worker is not there", extra={"request": flow.request})
        flow.stage = Stage.QUEUED
        flow.board.place(flow, now)


def resumed(flow: "Flow", message: wire.Resumed, now: float) -> None:
    """The attempt is this flow's: what the gateway lacks follows."""
    attempt = flow.attempt
    if attempt is None or flow.stage is not Stage.RESUMING or message.epoch != flow.epoch:
        return
    flow.board.adopted(flow)
    flow.emit_placed(None)
    aborted = [i for i, c in enumerate(flow.answer.choices) if c.finish == pb.ABORTED]
    if aborted:  # it may not have heard of them
        cancel = wire.CancelAttempt(attempt=attempt.id, choices=aborted)
        flow.board.to_decode(attempt.decode, wire.DecodeCommand(cancel=cancel))
    if not message.HasField("ticket"):
        flow.counted = True  # by the router before
        flow.stage = Stage.RUNNING
        return
    flow.stage = Stage.PREFILLING
    attempt.ids = flow.answer.prefix_ids()[:-1]
    attempt.ticket, attempt.prefill_boot = message.ticket, message.prefill_boot
    seek_prefill(flow, attempt, message.ticket, now)


def seek_prefill(flow: "Flow", attempt: Attempt, ticket: wire.Ticket, now: float) -> None:
    """Say PrefillStart again if the prefill worker is there; try anew if it will not be."""
    worker = flow.board.find(attempt.prefill_boot)
    if worker is not None:
        flow.start_prefill(attempt, worker, ticket, now)
    elif not flow.board.may_join(attempt.prefill_boot, now):
        flow.num_prefill_failures += 1
        flow.retry("its prefill worker is not there", now)


def hand_on(flow: "Flow", start: pb.Start, answer: "Answer") -> Attempt | None:
    """The same request was issued again, under a higher epoch: end without an event.

    An attempt that decode has admitted goes on under the new flow, which will find it. One that it
    has yet to answer is returned: the new flow takes it over, and the answer with it.
    """
    start.strikes = max(start.strikes, flow.strikes)
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


def take_over(flow: "Flow", attempt: Attempt) -> None:
    """Wait for decode's answer to what an earlier flow of the request has asked."""
    flow.attempt = attempt
    flow.num_attempts = 1
    flow.stage = Stage.ADMITTING
