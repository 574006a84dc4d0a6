"""The error catalogue: one row for each proto ErrorCode, and its translation to and from gRPC.

The message of a ServiceError is public text. Internal detail goes to the log, never into it.
"""

import math
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn

import grpc
from google.protobuf.message import DecodeError

from pdserve.protos import common_pb2 as pb

MAX_QUOTED = 200  # characters of a request that an error or a log line quotes
# Bytes of an error's text as gRPC sends it. Metadata of 16 KiB must hold it, and the Failure too.
MAX_MESSAGE = 4000
FAILURE_KEY = "pdserve-failure-bin"  # trailing metadata: the serialized Failure


class Mapping(NamedTuple):
    """The HTTP status and the gRPC status that clients receive for one ErrorCode."""

    http: int
    grpc: grpc.StatusCode


CATALOGUE: dict[pb.ErrorCode, Mapping] = {
    pb.INVALID_ARGUMENT: Mapping(400, grpc.StatusCode.INVALID_ARGUMENT),
    pb.CONTEXT_LENGTH_EXCEEDED: Mapping(400, grpc.StatusCode.OUT_OF_RANGE),
    pb.UNAUTHENTICATED: Mapping(401, grpc.StatusCode.UNAUTHENTICATED),
    pb.PERMISSION_DENIED: Mapping(403, grpc.StatusCode.PERMISSION_DENIED),
    pb.MODEL_NOT_FOUND: Mapping(404, grpc.StatusCode.NOT_FOUND),
    pb.OVERLOADED: Mapping(429, grpc.StatusCode.RESOURCE_EXHAUSTED),
    pb.UNAVAILABLE: Mapping(503, grpc.StatusCode.UNAVAILABLE),
    pb.QUEUE_TIMEOUT: Mapping(503, grpc.StatusCode.UNAVAILABLE),
    pb.DEADLINE_EXCEEDED: Mapping(504, grpc.StatusCode.DEADLINE_EXCEEDED),
    pb.CANCELLED: Mapping(499, grpc.StatusCode.CANCELLED),
    pb.POISON_REQUEST: Mapping(500, grpc.StatusCode.ABORTED),
    pb.INTERNAL: Mapping(500, grpc.StatusCode.INTERNAL),
    pb.INCOMPATIBLE_VERSION: Mapping(503, grpc.StatusCode.FAILED_PRECONDITION),
}
HTTP_STATUS: dict[pb.ErrorCode, int] = {code: row.http for code, row in CATALOGUE.items()}

# A status from a peer that sent no Failure (gRPC itself raised it).
_BARE_STATUS: dict[grpc.StatusCode, pb.ErrorCode] = {
    grpc.StatusCode.INVALID_ARGUMENT: pb.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED: pb.UNAUTHENTICATED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: pb.OVERLOADED,
    grpc.StatusCode.UNAVAILABLE: pb.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: pb.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED: pb.CANCELLED,
    grpc.StatusCode.FAILED_PRECONDITION: pb.INCOMPATIBLE_VERSION,
}


def cut(text: str, max_bytes: int) -> str:
    """Shorten an error's text so that gRPC sends at most `max_bytes` for it. The next process then
    need not shorten it again. A shortened text ends with a note of its original length in
    characters."""
    if len(text) <= max_bytes and sum(map(_sent_bytes, text)) <= max_bytes:
        return text
    suffix = _length_note(text)
    max_prefix_bytes = max_bytes - len(suffix)
    sizes = accumulate(map(_sent_bytes, text[:max_prefix_bytes]))
    return text[: sum(size <= max_prefix_bytes for size in sizes)] + suffix


def _sent_bytes(character: str) -> int:
    """Return how many bytes gRPC sends for a character of a status message. gRPC percent-encodes
    all but printable ASCII: each byte becomes three."""
    plain = " " <= character <= "~" and character != "%"
    return 1 if plain else 3 * len(character.encode(errors="replace"))


def _length_note(text: str) -> str:
    return f"... ({len(text)} characters)"


def quoted(text: str) -> str:
    """Return a client's text as it appears in an error or a log line: its repr, of which a text
    longer than MAX_QUOTED characters shows only these and a note of its length."""
    return repr(text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + _length_note(text))


class ServiceError(Exception):
    """An error with an ErrorCode and a text that clients may see. `param` names the faulty request
    parameter; `retry_after_s` says when a retry makes sense, 0 if that is unknown."""

    def __init__(
        self, code: pb.ErrorCode, message: str, param: str = "", retry_after_s: float = 0.0
    ) -> None:
        message = cut(message, MAX_MESSAGE)
        super().__init__(message)
        self.code = code if code in CATALOGUE else pb.INTERNAL
        self.message = message
        self.param = cut(param, MAX_QUOTED)
        self.retry_after_s = retry_after_s

    def to_failure(self) -> pb.Failure:
        """Convert the error to the Failure message; `retry_after_s` is rounded up to whole
        milliseconds."""
        return pb.Failure(
            code=self.code,
            message=self.message,
            param=self.param,
            retry_after_ms=math.ceil(self.retry_after_s * 1000),
        )

    @classmethod
    def from_failure(cls, failure: pb.Failure) -> "ServiceError":
        """Make the error from a peer's Failure message; an unknown error code becomes INTERNAL."""
        return cls(failure.code, failure.message, failure.param, failure.retry_after_ms / 1000)

    @classmethod
    def from_rpc(cls, error: grpc.RpcError) -> "ServiceError":
        """Make the error from a failed gRPC call: from the Failure message in its trailing
        metadata, or if there is none, from its gRPC status."""
        trailing: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else ()
        for key, value in trailing or ():
            if key == FAILURE_KEY:
                try:
                    return cls.from_failure(pb.Failure.FromString(bytes(value)))
                except DecodeError:
                    break
        status = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
        return cls(
            _BARE_STATUS.get(status, pb.INTERNAL),
            f"the other process returned gRPC status {status.name}",
        )


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", error: ServiceError) -> NoReturn:
    """End a gRPC call with the status and the text of the error, and with its Failure message in
    the trailing metadata. Trailing metadata that is already set is kept."""
    failure = (FAILURE_KEY, error.to_failure().SerializeToString())
    trailing = (*(context.trailing_metadata() or ()), failure)
    await context.abort(CATALOGUE[error.code].grpc, error.message, trailing)
    raise AssertionError("abort returned")
