"""The functions of the product that are under check; a seeded bug replaces one of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.engine.handoff.protocol import Bitmap, Handoff, machine
from pdserve.engine.scheduling import BlockTables
from pdserve.services.decode import lease_machine as lease
from pdserve.services.decode.lease_machine import Lease
from pdserve.services.router.request import machine as request_machine
from pdserve.services.router.request.actions import RoutingAction
from pdserve.services.router.request.events import RoutingEvent
from pdserve.services.router.request.state import Routing

HandoffStep = Callable[[Handoff, machine.Event, float], tuple[Handoff, machine.Actions]]
RequestStep = Callable[[Routing, RoutingEvent, float], tuple[Routing, tuple[RoutingAction, ...]]]
LeaseStep = Callable[[Lease, lease.Event, float], tuple[Lease, lease.Actions]]


class Violation(Exception):
    """An event that must never happen has happened."""


def takes_frames(state: Handoff) -> bool:
    """Implements Receiver._write: a verified frame is written only while its attempt
    holds blocks.
    """
    return state.holds


def is_complete(bitmap: Bitmap, computed: bool) -> bool:
    """Implements Receiver._commit_if_complete; `computed`: prefill has reported that it is done."""
    return bitmap.complete


def named(served: Sequence[int], attempt: int) -> int | None:
    """Implements DecodeCore.cancel: return the served attempts that a Cancel of `attempt` ends."""
    return attempt if attempt in served else None


@dataclass(frozen=True)
class Rules:
    """The rules; the defaults are the product's."""

    step: HandoffStep = machine.step
    lease_step: LeaseStep = lease.step
    request_step: RequestStep = request_machine.step
    tables: type[BlockTables] = BlockTables
    takes_frames: Callable[[Handoff], bool] = takes_frames
    is_complete: Callable[[Bitmap, bool], bool] = is_complete
    named: Callable[[Sequence[int], int], int | None] = named
