"""Error objects in OpenAI's format."""

from typing import Any

from pdserve.gateway.http import HttpError

CONTEXT_CODE = "context_length_exceeded"
# Codes that OpenAI names differently; a wrong field has no code, its name is in `param`.
_CODES = {
    "invalid_argument": None,
    "unauthenticated": "invalid_api_key",
    "overloaded": "rate_limit_exceeded",
}


def error_message(error: HttpError) -> str:
    """Return the text of an error. If a prompt is too long, the text has the code's name, by which
    LangChain recognizes the error."""
    if error.code != CONTEXT_CODE or CONTEXT_CODE in error.message:
        return error.message
    return f"{error.message} ({CONTEXT_CODE})"


def error_object(error: HttpError) -> dict[str, Any]:
    """Return the body of an error response, and the last event of a stream that fails."""
    if error.status == 429:
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {
            "message": error_message(error),
            "type": kind,
            "param": error.param or None,
            "code": _CODES.get(error.code, error.code or None),
        }
    }
