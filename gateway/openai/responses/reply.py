"""/v1/responses: generates a response, whole or as a stream of typed events, and serves the routes
of stored responses."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic_core import from_json, to_json
from starlette.responses import JSONResponse

from pdserve.gateway.caller import Caller
from pdserve.gateway.completion import HeldLogprobs
from pdserve.gateway.http.api import (
    ErrorFormat,
    HttpError,
    HttpLimits,
    JsonPieces,
    array_json,
    error_response,
    object_json,
    sent_event,
)
from pdserve.gateway.http.api import Event as SentEvent
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.http.docs import describe
from pdserve.gateway.http.guard import caller_of
from pdserve.gateway.http.responses import EventStream, Reply
from pdserve.gateway.openai.objects import (
    CONTEXT_CODE,
    OpenAiErrors,
    error_message,
    list_page,
    page_query,
)
from pdserve.gateway.openai.response_models import (
    InputItemList,
    InputTokens,
    PageQuery,
    ResponseDeleted,
    ResponseEvent,
    ResponseObject,
)
from pdserve.gateway.openai.responses.items import Item
from pdserve.gateway.openai.responses.output import Event, ResponseOutput
from pdserve.gateway.openai.responses.request_model import (
    InputTokensBody,
    ResponsePrompt,
    ResponsesBody,
    count_input_tokens,
    parse,
)
from pdserve.gateway.prepared_completion import PreparedCompletion, Usage
from pdserve.gateway.sampling import refuse
from pdserve.gateway.service import Service
from pdserve.gateway.storage import KeptResponse, ResponseStore
from pdserve.services.common.errors import ServiceError, quoted

IN_PROGRESS = "response.in_progress"
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
Object = dict[str, Any]


class ResponseReply(OpenAiErrors):
    """Generates the response for a validated request body. Call either `whole` or `framed`, once.

    It is also the error format of its stream: an error after the stream has begun becomes an event
    `response.failed`.
    """

    def __init__(
        self,
        service: Service,
        body: ResponsesBody,
        caller: Caller,
        bodies: BodyReader,
        store: ResponseStore | None,
    ) -> None:
        """Build the request. Without a `store` the response is not stored. Raises ServiceError for
        fields of the body that contradict each other."""
        self._service = service
        self._body = body
        self._store = store
        # A batch's file has its responses; if kept too, they would push out the client's others.
        is_requested = not caller.background if body.store is None else body.store
        self._keeps = store is not None and is_requested
        self._prompt = ResponsePrompt(body, caller, bodies, store)
        self._sampling = body.sampling()
        self._suffix = caller.request_id
        self._id = f"resp_{self._suffix}"
        self._caller = caller.of_body(self._id, body.session_id, body.user)
        self._created = int(time.time())
        self._output = ResponseOutput(
            self._suffix,
            logprobs=body.logprobs,
            reasons=body.shows_reasoning,
            summarized=body.summarized,
        )
        self._model = body.model
        self._params: Object = {}
        self._num_events = 0

    async def whole(self) -> JsonPieces:
        """Generate the whole response and return its JSON text. Raises ServiceError."""
        last: Event = {}
        async with aclosing(self.events()) as events:
            async for event in events:
                last = event
        response: JsonPieces = last["response"]
        return response

    async def framed(self) -> AsyncGenerator[SentEvent, None]:
        """Generate the response and yield its server-sent events, ready to be sent. Raises
        ServiceError."""
        async with aclosing(self.events()) as events:
            async for event in events:
                yield _framed(event)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Generate the response and yield its events as objects; the last one contains the whole
        response. Stores the response if requested. Raises ServiceError."""
        context = await self._prompt.items()
        request = replace(
            self._prompt.request(context, self._sampling),
            priority=self._body.priority or 0,
            max_tool_calls=self._body.max_tool_calls,
        )
        self._output.offered = self._prompt.offer.tools
        async with self._service.prepare(request, self._caller) as completion:
            self._learn(completion)
            # A stream's last event has them all, too.
            held_logprobs = HeldLogprobs(completion, instead="")
            finish, usage = "", Usage(0, 0, 0)
            async with aclosing(self._service.completions.stream(completion)) as items:
                async for item in items:
                    if not self._num_events:
                        for event in self._opening():
                            yield event
                    if isinstance(item, Usage):
                        usage = item
                        continue
                    held_logprobs.add(item)
                    for event in self._output.push(item):
                        yield self._numbered(event)
                    finish = item.finish or finish
            status = "incomplete" if finish == "length" else "completed"
            response = self._object(status, usage=self._usage(usage))
            if self._keeps:
                response = await self._keep(context, response)
            yield self._numbered({"type": f"response.{status}", "response": object_json(response)})

    def ping(self) -> bytes:
        """Return the event to send while nothing is generated: `response.in_progress`, since
        clients of this API do not accept comments as a sign of life. It leaves out instructions,
        tools and output, which may be long. Before the first event, returns the two opening events
        instead."""
        if not self._num_events:
            return _pieces(*self._opening()).text()
        omitted: Object = {"instructions": None, "output": [], "tools": []}
        response = object_json({**self._object("in_progress"), **omitted})
        return _pieces(self._numbered({"type": IN_PROGRESS, "response": response})).text()

    def _opening(self) -> list[Event]:
        """Return the first two events of the stream: `response.created` and
        `response.in_progress`."""
        response = object_json(self._object("in_progress"))
        kinds = ("response.created", IN_PROGRESS)
        return [self._numbered({"type": kind, "response": response}) for kind in kinds]

    def error_event(self, error: HttpError) -> SentEvent:
        if error.status == 429:
            code = "rate_limit_exceeded"
        elif error.code == CONTEXT_CODE:
            code = CONTEXT_CODE
        else:
            code = "invalid_prompt" if error.status < 500 else "server_error"
        response = self._object("failed", error={"code": code, "message": error_message(error)})
        failed = {"type": "response.failed", "response": object_json(response)}
        opening = [] if self._num_events else self._opening()
        return _framed(*opening, self._numbered(failed))

    def _learn(self, completion: PreparedCompletion) -> None:
        """Record the model and the sampling parameters in use, which the response object shows."""
        self._model = completion.model.card.name
        resolved = completion.prompts[0].params  # as float32
        for name in ("temperature", "top_p"):
            requested = getattr(self._body, name)
            recommended = getattr(resolved, name) if resolved.HasField(name) else 1.0
            self._params[name] = recommended if requested is None else requested

    async def _keep(self, items: list[Item], response: Object) -> Object:
        """Store the response and its input items. Returns the response with the field `store`:
        whether it was stored."""
        assert self._store is not None
        named_items = [
            item
            if "id" in item
            else {"id": f"{_PREFIXES.get(item['type'], 'item')}_{self._suffix}_in{i}", **item}
            for i, item in enumerate(items)
        ]
        kept_response = KeptResponse(
            self._id, object_json(response).text().decode(), to_json(named_items).decode()
        )
        try:
            stored = await self._store.save(self._caller.tenant.id, kept_response)
        except ServiceError:
            stored = False  # the store has logged why; the answer is still useful
        return {**response, "store": stored}

    def _numbered(self, event: Event) -> Event:
        numbered = {**event, "sequence_number": self._num_events}
        self._num_events += 1
        return numbered

    def _usage(self, usage: Usage) -> Object:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "pdserve": {"inexact": usage.inexact},
        }

    def _object(
        self, status: str, usage: Object | None = None, error: Object | None = None
    ) -> Object:
        body = self._body
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": array_json(self._output.items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id or None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {
                "effort": body.effort,
                "summary": "detailed" if body.summarized else None,
            },
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": self._keeps,
            **self._params,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": body.tool_choice or "auto",
            "tools": list(self._prompt.offer.shown),
            "top_logprobs": body.top_logprobs or 0,
            "truncation": "disabled",
            "usage": usage,
            "user": body.user,
        }


def _framed(*events: Event) -> SentEvent:
    return sent_event(_pieces(*events))


def _pieces(*events: Event) -> JsonPieces:
    pieces = JsonPieces()
    for event in events:
        pieces += (b"event: %b\ndata: " % event["type"].encode(), *object_json(event), b"\n\n")
    return pieces


PAGE = 20  # items, unless the client sets a limit
MAX_PAGE = 100


def add_response_routes(
    app: FastAPI,
    errors: ErrorFormat,
    service: Service,
    bodies: BodyReader,
    limits: HttpLimits,
    store: ResponseStore | None,
) -> None:
    """Add the routes of /v1/responses. Without a `store`, responses are not stored and none is
    found."""

    async def on_kept(
        request: Request, name: str, answer: Callable[[KeptResponse], Response]
    ) -> Response:
        """Find a stored response of the client's key and return `answer(response)`; 404 if there is
        none. Counts against the request limits of the key."""
        caller = caller_of(request)
        with service.limits.admit(caller.tenant.id):
            await service.count(caller)
            response = None if store is None else await store.find(caller.tenant.id, name)
        if response is None:
            message = f"response {quoted(name)} was not found"
            return error_response(errors, HttpError(404, message, "response_not_found"))
        return answer(response)

    @app.post(
        "/v1/responses", **describe(ResponsesBody, response=ResponseObject, event=ResponseEvent)
    )
    async def create(request: Request) -> Response:
        """Generate a response to a conversation, and store it if the server stores responses,
        unless `store` is false."""
        body = await bodies.read(request, partial(parse, ResponsesBody))
        reply = ResponseReply(service, body, caller_of(request), bodies, store)
        if body.stream:
            return EventStream(reply.framed(), reply, limits, ping=reply.ping)
        return Reply(reply.whole(), errors)

    @app.post("/v1/responses/input_tokens", **describe(InputTokensBody, response=InputTokens))
    async def input_tokens(request: Request) -> Response:
        """Count the tokens of the prompt that a request to /v1/responses would have."""
        body = await bodies.read(request, partial(parse, InputTokensBody))
        counting = count_input_tokens(service, body, caller_of(request), bodies, store)
        return Reply(counting, errors)

    @app.get("/v1/responses/{name}", **describe(response=ResponseObject))
    async def retrieve(request: Request, name: str) -> Response:
        """Get a stored response."""
        if request.query_params.get("stream") == "true":
            raise refuse("stream", "stream: a stored response cannot be streamed")
        return await on_kept(request, name, lambda response: _json(response.response))

    @app.delete("/v1/responses/{name}", **describe(response=ResponseDeleted))
    async def remove(request: Request, name: str) -> Response:
        """Delete a stored response."""
        deleted = {"id": name, "object": "response", "deleted": True}
        reply = await on_kept(request, name, lambda response: JSONResponse(deleted))
        if store is not None and reply.status_code == 200:
            await store.remove(caller_of(request).tenant.id, name)
        return reply

    @app.post("/v1/responses/{name}/cancel", **describe(response=ResponseObject))
    async def cancel(request: Request, name: str) -> Response:
        """Cancel a background response. Always returns an error, as this server has no background
        responses."""

        def too_late(response: KeptResponse) -> Response:
            raise refuse(
                "", "only background responses can be canceled, and this response is not one"
            )

        return await on_kept(request, name, too_late)

    @app.get(
        "/v1/responses/{name}/input_items",
        **describe(response=InputItemList, query=PageQuery),
    )
    async def input_items(request: Request, name: str) -> Response:
        """List the input items of a stored response."""
        page = _page_of(request)
        return await on_kept(request, name, lambda response: _json(to_json(page(response))))


def _json(text: str | bytes) -> Response:
    return Response(text, media_type="application/json")


def _page_of(request: Request) -> Callable[[KeptResponse], dict[str, Any]]:
    """Parse the URL parameters `limit`, `order` and `after`, and return a function that makes this
    page of a stored response's input items. Raises ServiceError for an invalid parameter."""
    after, limit, newest_first = page_query(request, PAGE, MAX_PAGE)

    def page(response: KeptResponse) -> dict[str, Any]:
        items = from_json(response.items)
        if newest_first:
            items.reverse()
        ids = [item["id"] for item in items]
        if after and after not in ids:
            raise refuse("after", f"after: no item has the id {quoted(after)}")
        # Start after the last item with that id: a client may have used one twice.
        start = len(ids) - ids[::-1].index(after) if after else 0
        data = items[start : start + limit]
        return list_page(data, has_more=start + len(data) < len(items))

    return page
