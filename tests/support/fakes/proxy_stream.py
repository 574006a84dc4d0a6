"""A proxy's side of ext_proc as a stub: the messages of one HTTP request, and the answers
to them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pdserve.protos import ext_proc_pb2 as pb
from pdserve.services.picker import servicer as messages
from pdserve.services.picker.servicer import Exchange

STREAMED, BUFFERED = pb.FULL_DUPLEX_STREAMED, pb.BUFFERED
CHAT = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}
MODELS = {":method": "GET", ":path": "/v1/models"}


def metadata(namespace: str, **values: Any) -> pb.FilterMetadata:
    """Return metadata; `_` in a key is replaced by a dash."""
    found = pb.FilterMetadata()
    named = {key.replace("_", "-"): value for key, value in values.items()}
    found.filter_metadata[namespace].update(named)
    return found


def subset(endpoints: str | Sequence[str]) -> pb.FilterMetadata:
    """Return the only endpoints that the picker may choose."""
    value = endpoints if isinstance(endpoints, str) else list(endpoints)
    return metadata(messages.HINT, x_gateway_destination_endpoint_subset=value)


def head(
    headers: Mapping[str, str],
    *,
    mode: pb.BodySendMode = STREAMED,
    response_mode: pb.BodySendMode = STREAMED,
    end_of_stream: bool = False,
    context: pb.FilterMetadata | None = None,
) -> pb.ProcessingRequest:
    values = [pb.HeaderValue(key=key, raw_value=value.encode()) for key, value in headers.items()]
    return pb.ProcessingRequest(
        request_headers=pb.HttpHeaders(
            headers=pb.HeaderMap(headers=values), end_of_stream=end_of_stream
        ),
        metadata_context=context,
        protocol_config=pb.ProtocolConfiguration(
            request_body_mode=mode, response_body_mode=response_mode
        ),
    )


def body(data: bytes, *, last: bool = True) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=last))


TRAILERS = pb.ProcessingRequest(request_trailers=pb.HttpTrailers())


class Told(NamedTuple):
    """A picker's answer to a request: its endpoints, or a status instead."""

    endpoints: list[str]
    status: int
    kinds: list[str]
    passed: bytes  # of the body
    ended: bool  # the stream of the body, by its last piece
    answers: list[pb.ProcessingResponse]


async def tell(exchange: Exchange, *sent: pb.ProcessingRequest) -> Told:
    """Add an answer; asserts that header and metadata agree if both are set."""
    answers = [answer for message in sent for answer in await exchange.take(message)]
    endpoints: list[str] = []
    status, passed, ended = 0, b"", False
    for answer in answers:
        kind = answer.WhichOneof("response")
        said = getattr(answer, str(kind))
        if kind == "immediate_response":
            status = said.status.code
            continue
        if kind == "request_body" and said.response.HasField("body_mutation"):
            assert not ended
            piece = said.response.body_mutation.streamed_response
            assert len(piece.body) <= 65536
            passed, ended = passed + piece.body, piece.end_of_stream
        if found := set_headers(answer).get(messages.DESTINATION):
            assert not endpoints, "two decisions"
            lb = answer.dynamic_metadata[messages.LB]
            assert isinstance(lb, Mapping) or hasattr(lb, "fields")
            assert lb[messages.DESTINATION] == found
            assert said.response.clear_route_cache
            endpoints = found.split(",")
    kinds = [str(answer.WhichOneof("response")) for answer in answers]
    return Told(endpoints, status, kinds, passed, ended, answers)


def set_headers(answer: pb.ProcessingResponse) -> dict[str, str]:
    """Return the headers that an answer sets."""
    kind = answer.WhichOneof("response")
    said = getattr(answer, str(kind))
    if kind == "immediate_response":
        mutation = said.headers
    elif kind in ("request_trailers", "response_trailers"):
        return {}
    else:
        mutation = said.response.header_mutation
    for option in mutation.set_headers:
        assert option.append_action == pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}
