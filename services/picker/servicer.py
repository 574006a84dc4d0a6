"""The ext_proc service: one HTTP request and its response, as a proxy reports them to the picker.

Names of headers and metadata are those of the Gateway API Inference Extension's endpoint picker
protocol.

The answer to the request's headers names the endpoint. For a proxy that streams the body in both
directions, that answer waits until the picker has read the body. A proxy that buffers the body is
answered at once, and the answer to the body names the endpoint. For any other proxy the headers
alone decide. Bodies pass through unchanged.
"""

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc.aio
from google.protobuf.struct_pb2 import Struct
from pydantic_core import to_json

from pdserve.gateway.http.api import HttpError
from pdserve.protos import ext_proc_pb2 as pb
from pdserve.protos import ext_proc_pb2_grpc
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.fairness import FairShare
from pdserve.services.common.tenants import EVERYBODY
from pdserve.services.picker.picker import (
    EndpointChoice,
    EndpointPicker,
    PickerMetrics,
    ProxiedRequest,
)

log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]

DESTINATION = "x-gateway-destination-endpoint"  # a header, and a key in LB
LB = "envoy.lb"
SERVED = "x-gateway-destination-endpoint-served"  # a key in LB, of responses
HINT = "envoy.lb.subset_hint"
SUBSET = "x-gateway-destination-endpoint-subset"  # a key in HINT
# Of the conformance tests: the endpoints that a client selects, what the echo server returns as a
# header of its response, and the header that names the endpoint that served.
TEST_SELECTION = "test-epp-endpoint-selection"
TEST_ECHO = "x-echo-set-header"
TEST_SERVED = "x-conformance-test-served-endpoint"
CHUNK_BYTES = 62_000  # of a streamed body; some proxies accept at most 64 KiB
OVERWRITE = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
# (path, error) -> the error, and its JSON object
ErrorWriter = Callable[[str, ServiceError], tuple[HttpError, dict[str, object]]]
Responses = list[pb.ProcessingResponse]


def headers_of(headers: pb.HttpHeaders) -> dict[str, str]:
    """Return headers by lower-case name; the first of several with one name."""
    values: dict[str, str] = {}
    for header in headers.headers.headers:
        value = header.raw_value.decode("latin-1") if header.raw_value else header.value
        values.setdefault(header.key.lower(), value)
    return values


def hint_of(request: pb.ProcessingRequest) -> list[str] | None:
    """Return the only endpoints that the proxy allows; None if it allows all. The proxy writes a
    list or a comma-separated text."""
    value = _metadata(request, HINT).get(SUBSET)
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else list(value)
    return [address for text in texts if isinstance(text, str) for address in addresses_of(text)]


def served_of(request: pb.ProcessingRequest) -> str:
    """Return the endpoint that answered; empty if the proxy does not report it."""
    served = _metadata(request, LB).get(SERVED, "")
    return served if isinstance(served, str) else ""


def addresses_of(text: str) -> list[str]:
    """Return the addresses of a comma-separated text."""
    return [item.strip() for item in text.split(",") if item.strip()]


def _metadata(request: pb.ProcessingRequest, namespace: str) -> Mapping[str, Any]:
    metadata = request.metadata_context.filter_metadata
    return dict(metadata[namespace]) if namespace in metadata else {}


def destination(
    endpoints: str, extra_headers: Mapping[str, str]
) -> tuple[pb.CommonResponse, Struct]:
    """Return the choice of endpoints as request headers, with the extra ones, and as dynamic
    metadata."""
    metadata = Struct()
    metadata.update({LB: {DESTINATION: endpoints}})
    common = pb.CommonResponse(
        header_mutation=mutation({DESTINATION: endpoints, **extra_headers}), clear_route_cache=True
    )
    return common, metadata


def mutation(headers: Mapping[str, str]) -> pb.HeaderMutation:
    """Return a mutation that sets or replaces headers."""
    options = [
        pb.HeaderValueOption(
            header=pb.HeaderValue(key=key, raw_value=value.encode()), append_action=OVERWRITE
        )
        for key, value in headers.items()
    ]
    return pb.HeaderMutation(set_headers=options)


def chunks(parts: Sequence[bytes], end_of_stream: bool) -> Iterator[pb.CommonResponse]:
    """Yield a body unchanged, in pieces that every proxy accepts; the last may end the stream."""
    body = b"".join(parts)
    starts = range(0, len(body), CHUNK_BYTES) or (0,)
    for start in starts:
        end = start + CHUNK_BYTES
        piece = pb.StreamedBodyResponse(
            body=body[start:end], end_of_stream=end_of_stream and end >= len(body)
        )
        yield pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=piece))


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> pb.ProcessingResponse:
    """Return the response that the client receives instead of an endpoint's."""
    all_headers = {"content-type": "application/json", **headers}
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status=pb.HttpStatus(code=status),
            headers=mutation(all_headers),
            body=body,
            details="endpoint_picker",
        )
    )


class HeldBodies:
    """Limits of the request bodies that are held until they are complete: of each, and of all
    together."""

    def __init__(self, max_body_bytes: int, max_bodies_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.share = FairShare(max_bodies_bytes)


class Exchange:
    """Processes the messages of one ext_proc stream in order; call `close` at the end."""

    def __init__(
        self,
        picker: EndpointPicker,
        write_error: ErrorWriter,
        bodies: HeldBodies,
        conformance_headers: bool = False,
    ) -> None:
        self._picker = picker
        self._write_error = write_error
        self._bodies = bodies
        self._conformance = conformance_headers
        self._request_mode = self._response_mode = pb.FULL_DUPLEX_STREAMED
        self._headers: dict[str, str] = {}
        self._hint: list[str] | None = None
        self._parts: list[bytes] = []  # of a streamed body, until the decision
        self._num_held = 0
        self._owner = EVERYBODY.id
        self._choice: EndpointChoice | None = None
        self._refused = False

    def close(self) -> None:
        """Release the bodies and the choice; no message follows."""
        self._give_back()
        if self._choice is not None:
            self._choice.ended()
            self._choice = None

    async def take(self, message: pb.ProcessingRequest) -> Responses:
        """Process a message. Returns the responses to it."""
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        if self._hint is None:
            self._hint = hint_of(message)
        if message.observability_mode or self._refused:
            return []
        match message.WhichOneof("request"):
            case "request_headers":
                return await self._request_headers(message.request_headers)
            case "request_body":
                return await self._request_body(message.request_body)
            case "request_trailers":
                return await self._request_trailers()
            case "response_headers":
                return self._response_headers(message)
            case "response_body":
                return self._response_body(message.response_body)
            case "response_trailers":
                return [pb.ProcessingResponse(response_trailers=pb.TrailersResponse())]
        return []

    # --- the request

    async def _request_headers(self, headers: pb.HttpHeaders) -> Responses:
        self._headers = headers_of(headers)
        waits = self._request_mode in (pb.FULL_DUPLEX_STREAMED, pb.BUFFERED)
        if headers.end_of_stream or not waits or not self._picker.wants_body(self._headers):
            return [await self._decision(b"")]
        tenant = self._picker.tenant(self._headers)
        self._owner = (tenant or EVERYBODY).id
        if self._request_mode == pb.BUFFERED:
            return [pb.ProcessingResponse(request_headers=pb.HeadersResponse())]
        return []

    async def _request_body(self, part: pb.HttpBody) -> Responses:
        if self._request_mode != pb.FULL_DUPLEX_STREAMED:
            if self._choice is None:
                fits = len(part.body) <= self._bodies.max_body_bytes
                return [await self._decision(part.body if fits else b"", with_body=True)]
            return [pb.ProcessingResponse(request_body=pb.BodyResponse())]
        self._parts.append(part.body)
        responses: Responses = []
        if self._choice is None:
            fits = self._hold(len(part.body))
            if fits and not part.end_of_stream:
                return []
            responses.append(await self._decision(b"".join(self._parts) if fits else b""))
        return responses + self._unsent_body(part.end_of_stream)

    async def _request_trailers(self) -> Responses:
        responses: Responses = []
        if self._choice is None:
            responses = [await self._decision(b"".join(self._parts)), *self._unsent_body(False)]
        if not self._refused:
            responses.append(pb.ProcessingResponse(request_trailers=pb.TrailersResponse()))
        return responses

    def _unsent_body(self, end_of_stream: bool) -> Responses:
        """Return the received parts of the body that were not passed on yet."""
        parts, self._parts = self._parts, []
        if self._refused or not (parts or end_of_stream):
            return []
        return [
            pb.ProcessingResponse(request_body=pb.BodyResponse(response=piece))
            for piece in chunks(parts, end_of_stream)
        ]

    def _hold(self, amount: int) -> bool:
        """Hold `amount` more bytes of a body. Returns False if the bounds forbid it."""
        share = self._bodies.share
        if self._num_held + amount > self._bodies.max_body_bytes or not share.has_room(
            self._owner, amount
        ):
            return False
        share.take(self._owner, amount)
        self._num_held += amount
        return True

    def _give_back(self) -> None:
        if self._num_held:
            self._bodies.share.give_back(self._owner, self._num_held)
            self._num_held = 0

    async def _decision(self, body: bytes, *, with_body: bool = False) -> pb.ProcessingResponse:
        """Return the answer with the decision: to the headers, or, `with_body`, to the body."""
        hint, extra_headers = self._hint, {}
        if self._conformance and TEST_SELECTION in self._headers:
            hint = addresses_of(self._headers[TEST_SELECTION])
        request = ProxiedRequest(self._headers, body, hint)
        try:
            self._choice = await self._picker.pick(request)
        except ServiceError as error:
            self._refused = True
            http_error, error_object = self._write_error(request.path, error)
            return refusal(http_error.status, http_error.headers, to_json(error_object))
        finally:
            self._give_back()
        endpoints = self._choice.text
        if self._conformance:
            extra_headers = {TEST_ECHO: f"{TEST_SERVED}:{endpoints}"}
        common, metadata = destination(endpoints, extra_headers)
        if with_body:
            body_response = pb.BodyResponse(response=common)
            return pb.ProcessingResponse(request_body=body_response, dynamic_metadata=metadata)
        headers_response = pb.HeadersResponse(response=common)
        return pb.ProcessingResponse(request_headers=headers_response, dynamic_metadata=metadata)

    # --- the response

    def _response_headers(self, message: pb.ProcessingRequest) -> Responses:
        served = served_of(message)
        if self._choice is not None and served:
            self._picker.served(self._choice, served)
        head = pb.HeadersResponse()
        if self._conformance:
            headers = {TEST_SERVED: served or "fail: the proxy did not report the endpoint"}
            head.response.header_mutation.CopyFrom(mutation(headers))
        return [pb.ProcessingResponse(response_headers=head)]

    def _response_body(self, part: pb.HttpBody) -> Responses:
        if self._response_mode != pb.FULL_DUPLEX_STREAMED:
            return [pb.ProcessingResponse(response_body=pb.BodyResponse())]
        return [
            pb.ProcessingResponse(response_body=pb.BodyResponse(response=piece))
            for piece in chunks([part.body], part.end_of_stream)
        ]


class ExternalProcessorServicer(ext_proc_pb2_grpc.ExternalProcessorServicer):
    """Serves ext_proc: one stream for each proxied HTTP request. `exchange` makes its Exchange."""

    def __init__(self, exchange: Callable[[], Exchange], metrics: PickerMetrics) -> None:
        self._exchange = exchange
        self._metrics = metrics

    async def Process(
        self, request_iterator: AsyncIterator[pb.ProcessingRequest], context: Context
    ) -> AsyncIterator[pb.ProcessingResponse]:
        """Serve one HTTP request until its proxy's stream ends. An exception here ends the stream
        with an error, and the Gateway's failure mode decides what happens to the request."""
        exchange = self._exchange()
        try:
            async for message in request_iterator:
                for response in await exchange.take(message):
                    yield response
        except Exception:
            self._metrics.failed()
            log.exception("an ext_proc stream failed")
            raise
        finally:
            exchange.close()
