"""Reads a request's JSON body within bounds: bytes, seconds, depth, and no NaN.

Depth is bounded by the parser (200 levels), numbers by their fields later.
"""

import asyncio
from typing import Any

from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from pdserve.protos.common_pb2 import CANCELLED, INVALID_ARGUMENT
from pdserve.services.host.errors import ServiceError


async def read_json(request: Request, max_bytes: int, limit_s: float) -> dict[str, Any]:
    """The JSON object of a body, whatever its Content-Type says.

    Raises HTTPException 413 (too large) or 408 (too slow), ServiceError INVALID_ARGUMENT.
    """
    declared = request.headers.get("content-length", "0")
    too_large = HTTPException(413, f"the body may have at most {max_bytes} bytes")
    if not declared.isdecimal() or len(declared) > 18 or int(declared) > max_bytes:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            async for chunk in request.stream():
                data += chunk
                if len(data) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise HTTPException(408, f"the body did not come within {limit_s:g} s") from None
    except ClientDisconnect:
        raise ServiceError(CANCELLED, "the client left") from None
    return parse_object(bytes(data))


def parse_object(data: bytes) -> dict[str, Any]:
    """Raises ServiceError INVALID_ARGUMENT."""
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        text = str(error)
        if "recursion limit" in text:
            text = "it is nested too deeply"
        raise ServiceError(INVALID_ARGUMENT, f"the body is not valid JSON: {text}") from None
    if not isinstance(value, dict):
        raise ServiceError(INVALID_ARGUMENT, "the body must be a JSON object")
    return value
