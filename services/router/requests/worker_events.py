"""What workers say of an attempt, taken by the flow whose attempt it is.

Of an attempt that is being resumed what was said before is passed over: it is said again.
"""

from typing import TYPE_CHECKING, Any

from pdserve.protos import common_pb2 as pb
from pdserve.protos.router_pb2 import RequestEvent
from pdserve.services.host.errors import ServiceError
from pdserve.services.host.request_progress import LostTokens
from pdserve.services.router.requests import adoption, single_flight
from pdserve.services.router.requests.effects import Stage

if TYPE_CHECKING:
    from pdserve.services.router.requests.request import RoutedRequest

PRODUCTS = ("tokens", "prompt_logprobs", "finished")
ANSWERS = ("admitted", "busy", "failed", "gone", "resumed")  # to Admit or Resume


def of_decode(flow: "RoutedRequest", kind: str, message: Any, now: float) -> None:
    """An event of a decode session, by its name in the proto."""
    match kind:
        case "tokens":
            _tokens(flow, message, now)
        case "prompt_logprobs":
            _prompt_logprobs(flow, message, now)
        case "finished":
            _finished(flow, message, now)
        case "verified":
            single_flight.verified(flow, message)
        case "admitted":
            flow.on_admitted(message, now)
        case "busy":
            flow.on_busy(now)
        case "gone":
            _gone(flow, now)
        case "resumed":
            adoption.resumed(flow, message, now)
        case "failed":
            _failed(flow, message.failure, now)
        case "attached":
            single_flight.attached(flow)
        case "place_again":
            single_flight.placed_again(flow, message, now)
        case "handoff_lost":
            _handoff_lost(flow, message.reason, now)


def of_prefill(flow: "RoutedRequest", kind: str, message: Any, now: float) -> None:
    """An event of a prefill session, by its name in the proto."""
    match kind:
        case "accepted":
            if flow.attempt is not None:
                flow.attempt.prefill_accepted = True
        case "done":
            _prefill_done(flow)
        case "failed":
            _prefill_failed(flow, message.failure.message, now, not message.handed_back)
        case _:
            _prefill_failed(flow, kind, now)


def _tokens(flow: "RoutedRequest", tokens: pb.Tokens, now: float) -> None:
    """New ids: pass on what continues the answer."""
    attempt = flow.attempt
    if attempt is None or flow.stage is Stage.RESUMING:  # of before: it is said again
        return
    attempt.produced = True
    flow.stage = Stage.RUNNING
    try:
        fresh = flow.answer.take(tokens)
    except LostTokens as error:
        flow.retry(str(error), now)
        return
    if fresh is not None:
        fresh.request = flow.request
        fresh.epoch = flow.epoch
        flow.origin = flow.origin or attempt.decode.identity
        if not attempt.adopted and fresh.position == 0:
            flow.beginning.token.came(attempt.id, attempt.began, now)
        flow.board.emit(flow, RequestEvent(tokens=fresh))


def _prompt_logprobs(flow: "RoutedRequest", logprobs: pb.PromptLogprobs, now: float) -> None:
    """Once per request, though every attempt may compute them."""
    attempt = flow.attempt
    if attempt is None or flow.stage is Stage.RESUMING:
        return
    attempt.produced = True
    try:
        fresh = flow.answer.take_scores(logprobs)
    except LostTokens as error:
        flow.retry(str(error), now)
        return
    if fresh is not None:
        fresh.request = flow.request
        flow.origin = flow.origin or attempt.decode.identity
        flow.board.emit(flow, RequestEvent(prompt_logprobs=fresh))


def _finished(flow: "RoutedRequest", finished: pb.Finished, now: float) -> None:
    """Every choice has ended at decode."""
    attempt = flow.attempt
    if attempt is None or flow.stage is Stage.RESUMING:
        return
    finished.request = flow.request
    finished.epoch = flow.epoch
    finished.inexact |= flow.inexact
    flow.beginning.complete(finished, flow.num_attempts, attempt.id)
    flow.end(RequestEvent(finished=finished), now, None)


def _handoff_lost(flow: "RoutedRequest", reason: str, now: float) -> None:
    """Decode gave up waiting for the KV; its blocks are free."""
    attempt = flow.attempt
    if attempt is not None:
        attempt.decode_over = True
    if attempt is not None and attempt.moves:
        flow.retry(f"decode lost its KV: {reason}", now)
    else:
        flow.prefill_lost(reason, now)


def _prefill_done(flow: "RoutedRequest") -> None:
    """Decode has verified every block."""
    if flow.attempt is not None:
        flow.attempt.prefill_done = flow.attempt.prefill_over = True


def _prefill_failed(flow: "RoutedRequest", reason: str, now: float, fault: bool = True) -> None:
    """Prefill ended it, or never began."""
    if flow.attempt is not None:
        flow.attempt.prefill_over = True
    flow.prefill_lost(reason, now, fault)


def _gone(flow: "RoutedRequest", now: float) -> None:
    """Decode does not know the attempt."""
    if flow.attempt is not None:
        flow.attempt.decode_over = True
    flow.retry("decode does not know the attempt", now)


def _failed(flow: "RoutedRequest", failure: pb.Failure, now: float) -> None:
    """Decode refused or failed it: terminal, unless another worker may still take it."""
    if flow.stage is Stage.RESUMING:
        return
    if flow.attempt is not None:
        flow.attempt.decode_over = True
    if failure.code in (pb.UNAVAILABLE, pb.OVERLOADED) and flow.stage is Stage.ADMITTING:
        flow.on_busy(now)
        return
    error = ServiceError.from_failure(failure)
    flow.fail(error.code, error.message, now, error.param, error.retry_after_s)
