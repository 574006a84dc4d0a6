"""An endpoint picker over scripted routers and prompts."""

import asyncio
import time
from collections.abc import Sequence

from pdserve.gateway.http.api import HttpError
from pdserve.gateway.openai import OpenAiErrors
from pdserve.protos.router_pb2 import PickedWorker, PickReply, PickRequest
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.tenants import ApiKeys, Tenant
from pdserve.services.picker.endpoints import Endpoints
from pdserve.services.picker.picker import EndpointPicker, PickerMetrics
from pdserve.services.picker.prompts import RequestPrompt
from pdserve.services.picker.servicer import Exchange, HeldBodies


class ScriptedRouters:
    """Returns `hosts`, limited to those in a request; `hangs` until it is cancelled."""

    def __init__(self) -> None:
        self.hosts: list[str] = []
        self.num_connected = 1
        self.hangs = False
        self.overloaded = False
        self.requests: list[PickRequest] = []

    async def pick(self, request: PickRequest) -> PickReply:
        self.requests.append(request)
        if self.hangs:
            await asyncio.Event().wait()
        found = [PickedWorker(host=host) for host in self.hosts if host in request.hosts]
        return PickReply(workers=found, overloaded=self.overloaded, elsewhere=not self.hosts)


class BytePrompts:
    """Uses the bytes of a body as its prompt."""

    def __init__(self) -> None:
        self.num_read = 0

    async def read(self, path: str, body: bytes, tenant: Tenant) -> RequestPrompt | None:
        self.num_read += 1
        return RequestPrompt("tiny", list(body), tenant.salt, "", "") if body[:1] == b"{" else None


def write_error(path: str, error: ServiceError) -> tuple[HttpError, dict[str, object]]:
    http_error = HttpError.of(error)
    return http_error, OpenAiErrors().error_object(http_error)


class ScriptedPicker:
    """A picker; `ready` are the endpoints that its names resolve to; None: it has no names."""

    def __init__(
        self,
        ready: Sequence[str] | None,
        *,
        keys: ApiKeys | None = None,
        fallbacks: int = 0,
        limit_s: float = 5.0,
        max_body_bytes: int = 1 << 20,
        max_bodies_bytes: int = 1 << 24,
        conformance_headers: bool = False,
    ) -> None:
        self.routers, self.prompts = ScriptedRouters(), BytePrompts()
        self.metrics = PickerMetrics()
        self.now = time.monotonic()
        self.endpoints = Endpoints([] if ready is None else ["names:1"], lambda: self.now)
        if ready is not None:
            self.endpoints.set_resolved(ready)
        self.picker = EndpointPicker(
            self.endpoints,
            self.routers,
            self.prompts,
            keys or ApiKeys(),
            self.metrics,
            lambda: self.now,
            limit_s,
            fallbacks,
        )
        self.bodies = HeldBodies(max_body_bytes, max_bodies_bytes)
        self._conformance = conformance_headers

    def exchange(self) -> Exchange:
        return Exchange(self.picker, write_error, self.bodies, self._conformance)

    def decisions(self) -> dict[str, int]:
        """Return the number of decisions by reason."""
        return {
            sample.labels["reason"]: int(sample.value)
            for metric in self.metrics.collect()
            for sample in metric.samples
            if sample.name == "pdserve_picker_decisions_total"
        }
