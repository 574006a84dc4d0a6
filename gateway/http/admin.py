"""The routes of the operator, which accept the admin key alone and exist only if one is set."""

import logging
from collections.abc import Callable
from typing import Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.background import BackgroundTask
from starlette.responses import JSONResponse

from pdserve.gateway.admin_key import AdminKey
from pdserve.gateway.http.docs import ADMIN_KEY, describe
from pdserve.gateway.http.guard import authorization_of, caller_of
from pdserve.protos.common_pb2 import UNAUTHENTICATED
from pdserve.services.common.errors import ServiceError

log = logging.getLogger("pdserve.gateway.admin")
ADMIN_PATHS = ("/shutdown",)


class ShuttingDown(BaseModel):
    status: Literal["shutting down"] = "shutting down"


def add_admin(app: FastAPI, key: AdminKey, shut_down: Callable[[], None]) -> None:
    """Add POST /shutdown, which calls `shut_down` after its answer. The caller must open
    ADMIN_PATHS to requests without a client's API key."""

    async def after_answer() -> None:
        shut_down()

    @app.post("/shutdown", **describe(response=ShuttingDown, security=ADMIN_KEY))
    async def shutdown(request: Request) -> Response:
        """Drain and end the server, as SIGTERM does. Requires the admin key
        (`--admin-api-key`)."""
        extra = {"request": caller_of(request).shown_id}
        if not key.accepts(authorization_of(request.headers)):
            log.warning("POST /shutdown refused: missing or wrong admin key", extra=extra)
            raise ServiceError(UNAUTHENTICATED, "this route requires the admin key")
        log.info("POST /shutdown with the admin key: the server drains and ends", extra=extra)
        return JSONResponse(ShuttingDown().model_dump(), background=BackgroundTask(after_answer))
