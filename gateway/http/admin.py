"""The routes of the operator, which accept the admin key alone and exist only if one is set."""

from collections.abc import Callable
from typing import Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.background import BackgroundTask
from starlette.responses import JSONResponse

from pdserve.gateway.http.docs import describe
from pdserve.gateway.http.guard import authorization_of
from pdserve.protos.common_pb2 import UNAUTHENTICATED
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.tenants import ApiKeys

ADMIN_PATHS = ("/shutdown",)


class ShuttingDown(BaseModel):
    status: Literal["shutting down"] = "shutting down"


def add_admin(app: FastAPI, admin_key: str, shut_down: Callable[[], None]) -> None:
    """Add POST /shutdown, which calls `shut_down` after its answer. The caller must open
    ADMIN_PATHS to requests without a client's API key."""

    keys = ApiKeys((admin_key,))

    async def after_answer() -> None:
        shut_down()

    @app.post("/shutdown", **describe(response=ShuttingDown))
    async def shutdown(request: Request) -> Response:
        """Drain and end the server, as SIGTERM does. Requires the admin key
        (`--admin-api-key`)."""
        if keys.tenant(authorization_of(request.headers)) is None:
            raise ServiceError(UNAUTHENTICATED, "this route requires the admin key")
        return JSONResponse(ShuttingDown().model_dump(), background=BackgroundTask(after_answer))
