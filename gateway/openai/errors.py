"""Error objects as OpenAI's clients know them; every response that is no answer is one."""

import math

from starlette.responses import JSONResponse

from pdserve.protos.common_pb2 import (
    CONTEXT_LENGTH_EXCEEDED,
    INTERNAL,
    MODEL_NOT_FOUND,
    OVERLOADED,
    UNAUTHENTICATED,
    ErrorCode,
)
from pdserve.services.host.errors import HTTP_STATUS, ServiceError

_CODES = {
    CONTEXT_LENGTH_EXCEEDED: "context_length_exceeded",
    MODEL_NOT_FOUND: "model_not_found",
    UNAUTHENTICATED: "invalid_api_key",
    OVERLOADED: "rate_limit_exceeded",
}
RETRY_STATUS = (429, 503)


def error_object(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, object]:
    """The body of an error response."""
    if status == 429:
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    message: str,
    status: int,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    return JSONResponse(error_object(message, status, param, code), status, headers)


def service_error_object(error: ServiceError) -> dict[str, object]:
    status = HTTP_STATUS[error.code]
    code = _CODES.get(error.code)
    if code is None and status >= 499:
        code = ErrorCode.Name(error.code).lower()
    return error_object(error.message, status, error.param or None, code)


def service_error_response(error: ServiceError) -> JSONResponse:
    """A ServiceError with its status, and Retry-After where coming back helps."""
    status = HTTP_STATUS[error.code]
    headers = {}
    if status in RETRY_STATUS:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return JSONResponse(service_error_object(error), status, headers)


def internal_error() -> ServiceError:
    """What a client hears of a fault of ours; the rest is in the log."""
    return ServiceError(INTERNAL, "the server made a mistake; its log has the details")
