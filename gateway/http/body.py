"""Reads JSON bodies within bounds: bytes of one and of all, seconds, depth, and no NaN.

The parser bounds depth (200 levels); fields bound their numbers later. The event loop parses, so
the number of a body's values is bounded too: it determines the time, not the bytes. Each pass of
the loop parses one body that is not small, and tenants take turns.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from pdserve.gateway.caller import Caller
from pdserve.gateway.http.api import HttpLimits
from pdserve.gateway.http.guard import caller_of
from pdserve.protos.common_pb2 import CANCELLED, INVALID_ARGUMENT, OVERLOADED
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.fairness import FairSemaphore, FairShare

MAX_VALUES = 1 << 19  # in one body; parsing that many takes about 0.1 s
SMALL_BYTES = 1 << 13  # of a body that is parsed at once: within 2 ms, whatever its content
VALUE_BYTES = 64  # memory of a parsed value, about

T = TypeVar("T")


class BodyReader:
    """Reader of the bodies of all dialects. Together they hold `max_bodies_bytes`, parsed values
    included, from their first byte until they are answered; each tenant has a share (FairShare)."""

    def __init__(self, limits: HttpLimits) -> None:
        self._max_bytes = limits.max_body_bytes
        self._limit_s = limits.body_timeout_s
        self._held = FairShare(limits.max_bodies_bytes)
        self._parsing = FairSemaphore(1)

    async def read(self, request: Request, check: Callable[[dict[str, Any]], T]) -> T:
        """Return what `check` makes of the JSON object of a body; `check` may take long, too.

        Raises HTTPException 415 (compressed, or another content type: a page of any origin may send
        those), 413 (too large) or 408 (too slow), ServiceError INVALID_ARGUMENT, and OVERLOADED if
        there is no room for the body.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise HTTPException(415, "the body must be JSON, with 'Content-Type: application/json'")
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding != "identity":
            text = f"compressed bodies are not supported; remove 'Content-Encoding: {coding[:40]}'"
            raise HTTPException(415, text)
        declared = request.headers.get("content-length", "0")
        if not declared.isdecimal() or len(declared) > 18 or int(declared) > self._max_bytes:
            raise self._too_large()
        caller = caller_of(request)
        owner = caller.tenant.id
        data = bytearray()
        try:
            await self._receive(request, owner, data)
        finally:
            self._return_at_end(caller, len(data))
        if len(data) <= SMALL_BYTES:
            return check(self._parse(caller, data))
        async with self._parsing.turn(owner):
            await asyncio.sleep(0)  # lets what was parsed before go on
            return check(self._parse(caller, data))

    def hold(self, caller: Caller, amount: int) -> None:
        """Count bytes that a request needs besides its body. Raises ServiceError OVERLOADED if
        there is no room for them."""
        self._take(caller.tenant.id, amount)
        self._return_at_end(caller, amount)

    def _parse(self, caller: Caller, data: bytearray) -> dict[str, Any]:
        self.hold(caller, num_values(data) * VALUE_BYTES)
        return parse_object(data)

    def _take(self, owner: bytes, amount: int) -> None:
        if not self._held.has_room(owner, amount):
            raise ServiceError(
                OVERLOADED, "too many request bodies at once; retry later", retry_after_s=1.0
            )
        self._held.take(owner, amount)

    def _return_at_end(self, caller: Caller, amount: int) -> None:
        if amount:
            caller.at_end.callback(self._held.give_back, caller.tenant.id, amount)

    async def _receive(self, request: Request, owner: bytes, data: bytearray) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                async for chunk in request.stream():
                    if len(data) + len(chunk) > self._max_bytes:
                        raise self._too_large()
                    self._take(owner, len(chunk))
                    data += chunk
        except TimeoutError:
            raise HTTPException(
                408, f"the body was not received within {self._limit_s:g} s"
            ) from None
        except ClientDisconnect:
            raise ServiceError(CANCELLED, "the client closed the connection") from None

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body is larger than {self._max_bytes} bytes")


def num_values(data: bytes | bytearray) -> int:
    """Return an upper bound on the values and keys of a JSON text; keys take as long as values.
    Counts the mark before each, so marks within strings count too. Raises ServiceError
    INVALID_ARGUMENT for too many."""
    count = sum(data.count(mark) for mark in b",:[{")
    if count > MAX_VALUES:
        raise ServiceError(INVALID_ARGUMENT, f"the body has more than {MAX_VALUES} values")
    return count


def parse_object(data: bytes | bytearray) -> dict[str, Any]:
    """Parse a JSON object. Raises ServiceError INVALID_ARGUMENT."""
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
