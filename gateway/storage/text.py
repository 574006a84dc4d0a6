"""Checks texts of clients before they are sent to a database.

PostgreSQL rejects texts with a NUL character, SQLite does not; these checks refuse it for both.
"""

from pdserve.protos.common_pb2 import INVALID_ARGUMENT
from pdserve.services.common.errors import ServiceError

_NUL = "\0"


def may_be_id(text: str, max_len: int) -> bool:
    """Whether a row can have this id, of at most `max_len` characters."""
    return len(text) <= max_len and _NUL not in text


def check_text(text: str, param: str) -> None:
    """Raises ServiceError, naming the parameter, if a text has a NUL character."""
    if _NUL in text:
        raise ServiceError(INVALID_ARGUMENT, f"{param}: a NUL character is not allowed", param)


def without_nul(text: str) -> str:
    """The text without its NUL characters."""
    return text.replace(_NUL, "")
