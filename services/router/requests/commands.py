"""What the router says to workers, as messages; pure."""

from collections.abc import Iterator, Sequence

from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire
from pdserve.services.host.fragments import send_ids


def admit(
    admit: wire.Admit, start: pb.Start, prompt_ids: Sequence[int]
) -> Iterator[wire.DecodeCommand]:
    """Hand the request over; `start` comes without prompt ids, which go ahead in parts."""
    parts, tail = send_ids(start.request, prompt_ids)
    for part in parts:
        yield wire.DecodeCommand(ids_part=part)
    start.prompt_ids.extend(tail)
    admit.start.CopyFrom(start)
    yield wire.DecodeCommand(admit=admit)


def resume(attempt: bytes, epoch: int, choices: Sequence[pb.ChoiceState]) -> wire.DecodeCommand:
    """Ask for an attempt that another session has, or had; `choices`: what is known of it."""
    counts = [len(choice.generated_ids) for choice in choices]
    return wire.DecodeCommand(resume=wire.Resume(attempt=attempt, epoch=epoch, counts=counts))


def start_prefill(start: wire.PrefillStart, ids: Sequence[int]) -> Iterator[wire.PrefillCommand]:
    """Have the KV of `ids` computed; `start` comes without them."""
    parts, tail = send_ids(start.attempt.hex(), ids)
    for part in parts:
        yield wire.PrefillCommand(ids_part=part)
    start.ids.extend(tail)
    yield wire.PrefillCommand(start=start)


def hold(attempt: bytes) -> wire.DecodeCommand:
    """Have it stop, for a migration."""
    return wire.DecodeCommand(hold=wire.Hold(attempt=attempt))


def move(
    attempt: bytes, to: bytes, ticket: wire.Ticket, kv_identity: pb.KvIdentity
) -> wire.DecodeCommand:
    """Have its KV sent to the attempt `to`, on a worker of that KV identity."""
    return wire.DecodeCommand(
        move=wire.Move(attempt=attempt, to=to, ticket=ticket, kv_identity=kv_identity)
    )


def stay(attempt: bytes) -> wire.DecodeCommand:
    """Have it go on where it is."""
    return wire.DecodeCommand(stay=wire.Stay(attempt=attempt))


def cancel_at_decode(attempt: bytes, choices: Sequence[int] = ()) -> wire.DecodeCommand:
    """End it, or some of its choices."""
    return wire.DecodeCommand(cancel=wire.CancelAttempt(attempt=attempt, choices=choices))


def cancel_at_prefill(attempt: bytes) -> wire.PrefillCommand:
    """End it."""
    return wire.PrefillCommand(cancel=wire.CancelAttempt(attempt=attempt))
