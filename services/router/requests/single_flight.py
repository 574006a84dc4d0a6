"""What a flow learns of KV that decode keeps, or awaits for another request (single flight).

Decode decides who follows whom: an Admitted without a ticket ends the search for a prefill worker.
A follower has held nothing, so one that is to be placed again has not been tried, and nobody has
failed.
"""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.protos import worker_pb2 as wire
from pdserve.services.router.requests.effects import Attempt

if TYPE_CHECKING:
    from pdserve.services.router.requests.request import RoutedRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedKv:
    """What an Admit says of the KV of other prompts."""

    min_tokens: int  # of them that are worth waiting for
    expected: bool  # decode is expected to wait


def settle(attempt: Attempt, admitted: wire.Admitted, now: float) -> None:
    """Who computes its prompt, as decode has answered."""
    expected, attempt.follows = attempt.follows, admitted.follows
    prefill = attempt.prefill
    if prefill is None:
        return
    if not admitted.HasField("ticket"):
        prefill.unreported.pop(attempt.id, None)
        attempt.prefill = None
    elif expected:
        prefill.commanded(attempt.id, len(attempt.ids), now)


def verified(flow: "RoutedRequest", message: wire.Verified) -> None:
    """Decode keeps what it has verified, whatever becomes of the attempt."""
    if flow.attempt is not None:
        _keeps(flow, flow.attempt, message.tokens)
        if flow.beginning.hit is None:
            flow.beginning.hit = message.cached_tokens


def attached(flow: "RoutedRequest") -> None:
    """What it waited for is there: decode may compute it from now on."""
    if flow.attempt is not None:
        flow.attempt.follows = False


def placed_again(flow: "RoutedRequest", message: wire.PlaceAgain, now: float) -> None:
    """Its wait was in vain, or the rest is worth a hand-off."""
    if flow.attempt is not None:
        log.info("placed again: %s", message.reason, extra={"request": flow.request})
        _keeps(flow, flow.attempt, message.tokens)
        flow.not_tried(message.reason, now)


def _keeps(flow: "RoutedRequest", attempt: Attempt, tokens: int) -> None:
    boot = attempt.decode.boot
    flow.verified[boot] = max(flow.verified.get(boot, 0), tokens)
