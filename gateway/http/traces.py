"""GET /v1/traces/{request_id}: the time that each phase of one request took."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from pdserve.gateway.http.dialect import Dialect, HttpError, dialect_of, error_response
from pdserve.gateway.http.docs.document import AnswerModel, described
from pdserve.gateway.http.guard import caller_of
from pdserve.gateway.observability.meter import MeteredRequest
from pdserve.gateway.service import Service
from pdserve.services.host.errors import quoted


class TracePhase(AnswerModel):
    """A phase; `start_ms` counts from the arrival of the request."""

    name: str
    start_ms: float
    duration_ms: float


class TraceAttempt(AnswerModel):
    """A placement of the request, the first or a retry; `prefill` is empty if the decode worker
    computes the prompt."""

    attempt: str
    start_ms: float
    decode: str
    prefill: str


class RequestTrace(AnswerModel):
    """The phases of one request. The phases before `decode` add up to `time_to_first_token_ms`,
    which counts from the arrival of the request's headers. A running request lacks the phases that
    are not known yet. `finish_reason` may be an error code."""

    id: str
    object: Literal["trace"] = "trace"
    trace_id: str | None
    model: str
    state: str
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    transport: str | None
    phases: list[TracePhase]
    attempts: list[TraceAttempt]
    time_to_first_token_ms: float | None
    total_ms: float


class FoundTrace(BaseModel):
    """A trace from one of several gateway processes; `arrived` is by the clock of their host."""

    arrived: float
    trace: RequestTrace


def add_traces(app: FastAPI, service: Service, dialects: Sequence[Dialect]) -> None:
    """Mount the route."""

    def local_trace(tenant: bytes, request_id: str) -> FoundTrace | None:
        state = service.requests.find(tenant, request_id)
        if state is None:
            return None
        return FoundTrace(arrived=state.arrived, trace=_answer(state))

    def answer(tenant: bytes, request_id: str) -> bytes:
        match = local_trace(tenant, request_id)
        return match.model_dump_json().encode() if match else b""

    service.siblings.answer("trace", answer)

    @app.get("/v1/traces/{request_id:path}", **described(answer=RequestTrace))
    async def trace(request_id: str, request: Request) -> Response:
        """Get the time that each phase of a recent request of this key took. `request_id` is the
        answer's `x-request-id` header, or its `id`."""
        tenant = caller_of(request).tenant.id
        others = await service.siblings.ask("trace", tenant, request_id)
        traces = [local_trace(tenant, request_id), *map(FoundTrace.model_validate_json, others)]
        match = max(filter(None, traces), key=lambda item: item.arrived, default=None)
        if match is None:
            text = f"request not found: {quoted(request_id)}; only recent requests are kept"
            error = HttpError(404, text, "not_found", param="request_id")
            error = replace(error, request_id=caller_of(request).shown_id)
            return error_response(dialect_of(dialects, request.url.path), error)
        headers = {"cache-control": "no-store"}
        page = match.trace.model_dump_json()
        return Response(page, media_type="application/json", headers=headers)


def _answer(state: MeteredRequest) -> RequestTrace:
    first_s, is_local = state.first_token_s, state.prefill_at in ("", "local")
    return RequestTrace(
        id=state.request_id,
        trace_id=state.trace_id or None,
        model=state.model,
        state=state.phase,
        finish_reason=state.finish or None,
        prompt_tokens=state.prompt_tokens,
        cached_tokens=state.cached_tokens,
        completion_tokens=state.generated_tokens,
        transport=None if is_local else state.prefill_at,
        phases=[
            TracePhase(name=item.name, start_ms=_ms(item.start_s), duration_ms=_ms(item.duration_s))
            for item in state.timeline()
        ],
        attempts=[
            TraceAttempt(
                attempt=item.attempt.hex(),
                start_ms=_ms(state.receive_s + item.at_s),
                decode=item.decode,
                prefill=item.prefill,
            )
            for item in state.attempts
        ],
        time_to_first_token_ms=None if first_s is None else _ms(state.receive_s + first_s),
        total_ms=_ms(state.receive_s + state.elapsed_s),
    )


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
