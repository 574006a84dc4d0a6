"""Reads JSON bodies within bounds: bytes of one and of all, seconds, depth, and no NaN.

Depth is bounded by the parser (200 levels), numbers by their fields later. The event loop parses,
so a body's values are bounded too: it is their number, not its bytes, that takes the time.
"""

import asyncio
from typing import Any

from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from pdserve.gateway.caller import Caller
from pdserve.gateway.http.dialect import HttpLimits
from pdserve.protos.common_pb2 import CANCELLED, INVALID_ARGUMENT, OVERLOADED
from pdserve.services.host.errors import ServiceError
from pdserve.services.host.tenants.fairness import FairShare

MAX_VALUES = 1 << 19  # of one body; parsing that many takes about 0.1 s


class BodyReader:
    """Reads the bodies of all dialects. Together they have at most `max_bodies_bytes`, from their
    first byte until they are answered, of which each tenant has a share."""

    def __init__(self, limits: HttpLimits) -> None:
        self._max_bytes = limits.max_body_bytes
        self._limit_s = limits.body_timeout_s
        self._held = FairShare(limits.max_bodies_bytes)

    async def read(self, request: Request) -> dict[str, Any]:
        """The JSON object of a body.

        Raises HTTPException 415 (another content type: a page of any origin may send those), 413
        (too large) or 408 (too slow), ServiceError INVALID_ARGUMENT, and OVERLOADED if there is no
        room for it.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise HTTPException(415, "send JSON, with 'Content-Type: application/json'")
        declared = request.headers.get("content-length", "0")
        if not declared.isdecimal() or len(declared) > 18 or int(declared) > self._max_bytes:
            raise self._too_large()
        caller: Caller = request.state.caller  # set by the Guard
        data = bytearray()
        try:
            await self._receive(request, caller.tenant.id, data)
        finally:
            caller.at_end.callback(self._give_back, caller.tenant.id, len(data))
        return parse_object(bytes(data))

    def _give_back(self, owner: bytes, amount: int) -> None:
        if amount:
            self._held.give_back(owner, amount)

    async def _receive(self, request: Request, owner: bytes, data: bytearray) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                async for chunk in request.stream():
                    if len(data) + len(chunk) > self._max_bytes:
                        raise self._too_large()
                    if not self._held.has_room(owner, len(chunk)):
                        raise ServiceError(OVERLOADED, "too many bodies at once", retry_after_s=1.0)
                    self._held.take(owner, len(chunk))
                    data += chunk
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {self._limit_s:g} s") from None
        except ClientDisconnect:
            raise ServiceError(CANCELLED, "the client left") from None

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body may have at most {self._max_bytes} bytes")


def parse_object(data: bytes) -> dict[str, Any]:
    """Raises ServiceError INVALID_ARGUMENT.

    A value is counted by the comma or bracket before it, so those within strings count too.
    """
    if sum(data.count(mark) for mark in b",[{") > MAX_VALUES:
        raise ServiceError(INVALID_ARGUMENT, f"the body has more than {MAX_VALUES} values")
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
