"""Messages between router and workers: builds commands, converts events for the machine. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any

from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rpc import send_ids
from pdserve.services.router.request import events as on


def admit(
    admit: wire.Admit, start: pb.Start, prompt_ids: Sequence[int]
) -> Iterator[wire.DecodeCommand]:
    """Build the commands that admit a request. Prompt ids, not in `start`, go ahead in parts."""
    parts, tail = send_ids(start.request, prompt_ids)
    for part in parts:
        yield wire.DecodeCommand(ids_part=part)
    command = wire.DecodeCommand(admit=admit)
    command.admit.start.CopyFrom(start)
    command.admit.start.prompt_ids.extend(tail)  # after CopyFrom, which would copy them, too
    yield command


def resume(attempt: bytes, epoch: int, choices: Sequence[pb.ChoiceState]) -> wire.DecodeCommand:
    """Request an attempt that another session owns or owned. `choices`: as the router knows
    them."""
    counts = [len(choice.generated_ids) for choice in choices]
    return wire.DecodeCommand(resume=wire.Resume(attempt=attempt, epoch=epoch, counts=counts))


def start_prefill(start: wire.PrefillStart, ids: Sequence[int]) -> Iterator[wire.PrefillCommand]:
    """Build the commands that have the KV of `ids` computed; `start` comes without them."""
    parts, tail = send_ids(start.attempt.hex(), ids)
    for part in parts:
        yield wire.PrefillCommand(ids_part=part)
    command = wire.PrefillCommand(start=start)
    command.start.ids.extend(tail)
    yield command


def hold(attempt: bytes) -> wire.DecodeCommand:
    """Stop the attempt, for a migration."""
    return wire.DecodeCommand(hold=wire.Hold(attempt=attempt))


def move(
    attempt: bytes, to: bytes, ticket: wire.Ticket, kv_identity: pb.KvIdentity
) -> wire.DecodeCommand:
    """Have the attempt's KV sent to the attempt `to`, on a worker of that KV identity."""
    return wire.DecodeCommand(
        move=wire.Move(attempt=attempt, to=to, ticket=ticket, kv_identity=kv_identity)
    )


def stay(attempt: bytes) -> wire.DecodeCommand:
    """Let a held attempt go on where it is."""
    return wire.DecodeCommand(stay=wire.Stay(attempt=attempt))


def cancel_at_decode(attempt: bytes, choices: Sequence[int] = ()) -> wire.DecodeCommand:
    """End the attempt, or only some of its choices."""
    return wire.DecodeCommand(cancel=wire.CancelAttempt(attempt=attempt, choices=choices))


def cancel_at_prefill(attempt: bytes) -> wire.PrefillCommand:
    """End the attempt."""
    return wire.PrefillCommand(cancel=wire.CancelAttempt(attempt=attempt))


def of_decode(kind: str, message: Any) -> on.RoutingEvent:
    """Convert a self-contained event of a decode session; `kind` is its name in the proto. Raises
    ValueError for any other event."""
    attempt = message.attempt
    match kind:
        case "admitted":
            return on.AdmitAccepted(attempt, message.HasField("ticket"), message.follows)
        case "busy":
            return on.AdmitRefused(attempt)
        case "gone":
            return on.AttemptUnknown(attempt)
        case "finished":
            return on.AttemptFinished(attempt)
        case "failed":
            elsewhere = message.failure.code in (pb.UNAVAILABLE, pb.OVERLOADED)
            return on.AttemptFailed(attempt, ServiceError.from_failure(message.failure), elsewhere)
        case "handoff_lost":
            return on.KvLost(attempt, message.reason)
        case "attached":
            return on.WaitEnded(attempt)
        case "place_again":
            return on.WaitFailed(attempt, message.reason)
        case "moved":
            return on.SourceMoved(attempt, message.to)
        case "stayed":
            return on.SourceStayed(attempt, message.reason)
    raise ValueError(f"unexpected event of decode: {kind}")


def of_prefill(kind: str, message: Any) -> on.RoutingEvent:
    """Convert an event of a prefill session; `kind` is its name in the proto."""
    attempt = message.attempt
    match kind:
        case "accepted":
            return on.PrefillStarted(attempt)
        case "done":
            return on.PrefillSent(attempt)
        case "failed":
            return on.PrefillEnded(attempt, message.failure.message, not message.handed_back)
    return on.PrefillEnded(attempt, kind)  # Busy or Gone
