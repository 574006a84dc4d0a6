"""The messages between a proxy and a picker: header names, metadata, answers. Pure.

Names are those of the Gateway API Inference Extension's endpoint picker protocol.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.struct_pb2 import Struct

from pdserve.protos import ext_proc_pb2 as pb

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
    """Return the decision as request headers, with the extra ones, and as dynamic metadata."""
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
    """Return the answer that the client gets instead of an endpoint's."""
    all_headers = {"content-type": "application/json", **headers}
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status=pb.HttpStatus(code=status),
            headers=mutation(all_headers),
            body=body,
            details="endpoint_picker",
        )
    )
