"""Why a Start is not taken."""

from collections.abc import Collection

from pdserve.protos import common_pb2 as pb
from pdserve.services.host.errors import ServiceError
from pdserve.services.router.requests.request import MAX_CRASHES, RoutedRequest


def refusal(
    flow: RoutedRequest, draining: bool, full: bool, models: Collection[str], young: bool
) -> ServiceError | None:
    """None: it is taken. full: no more may wait; models: every name that was ever served here;
    young: workers may still be joining."""
    if draining:
        return ServiceError(pb.UNAVAILABLE, "the router is shutting down", "", 1.0)
    if flow.crash_count >= MAX_CRASHES:
        return ServiceError(pb.POISON_REQUEST, "the request was running on two workers that died")
    # It was taken once, so it is taken again.
    resumed = flow.answer.start.HasField("placement") or flow.answer.begun
    if full and not resumed:
        return ServiceError(pb.OVERLOADED, "too many requests are waiting", "", 1.0)
    if flow.model in models:
        return None
    if young and (resumed or not models):
        return None
    if not models:
        return ServiceError(pb.UNAVAILABLE, "no worker has joined", "", 1.0)
    return ServiceError(pb.MODEL_NOT_FOUND, f"model {flow.model!r} is not served", "model")
