"""The error catalogue: every code has a row, and an error survives a round trip to a peer."""

from typing import Any
from urllib.parse import quote

import grpc
import pytest

from pdserve.protos import common_pb2 as pb
from pdserve.services.common.errors import (
    CATALOGUE,
    FAILURE_KEY,
    HTTP_STATUS,
    MAX_MESSAGE,
    ServiceError,
)

CODES = [code for code in pb.ErrorCode.values() if code != pb.ERROR_CODE_UNSPECIFIED]


def test_the_catalogue_is_complete() -> None:
    assert set(CATALOGUE) == set(HTTP_STATUS) == set(CODES)
    assert HTTP_STATUS[pb.OVERLOADED] == 429
    assert HTTP_STATUS[pb.CONTEXT_LENGTH_EXCEEDED] == 400


def test_round_trip(subtests: pytest.Subtests) -> None:
    for code in CODES:
        with subtests.test(pb.ErrorCode.Name(code)):
            error = ServiceError(code, "text", "max_tokens", 1.5)
            back = ServiceError.from_failure(error.to_failure())
            assert (back.code, back.message, back.param) == (code, "text", "max_tokens")
            assert back.retry_after_s == 1.5
            assert str(back) == "text"


def test_an_unknown_code_is_internal() -> None:
    failure = pb.Failure.FromString(b"\x08\x63")  # code 99, from a newer peer
    assert ServiceError.from_failure(failure).code == pb.INTERNAL


class Rpc(grpc.RpcError):
    def __init__(self, status: grpc.StatusCode, trailing: Any = ()) -> None:
        self._status, self._trailing = status, trailing

    def code(self) -> grpc.StatusCode:
        return self._status

    def trailing_metadata(self) -> Any:
        return self._trailing


def test_errors_of_calls() -> None:
    failure = ServiceError(pb.QUEUE_TIMEOUT, "waited", "", 2).to_failure()
    trailing = ((FAILURE_KEY, failure.SerializeToString()),)
    assert (
        ServiceError.from_rpc(Rpc(grpc.StatusCode.UNAVAILABLE, trailing)).code == pb.QUEUE_TIMEOUT
    )
    assert ServiceError.from_rpc(Rpc(grpc.StatusCode.UNAVAILABLE)).code == pb.UNAVAILABLE
    assert ServiceError.from_rpc(Rpc(grpc.StatusCode.DATA_LOSS)).code == pb.INTERNAL
    garbage = ((FAILURE_KEY, b"\xff\xff"),)
    assert ServiceError.from_rpc(Rpc(grpc.StatusCode.CANCELLED, garbage)).code == pb.CANCELLED


def test_a_long_message_is_cut_once(subtests: pytest.Subtests) -> None:
    """The message fits the metadata of gRPC, which percent-encodes it."""
    for written in ("x", "%", "\n", "\u4e2d", "\U0001f600", "a\u4e2d"):
        with subtests.test(written=written):
            text = written * 100_000
            error = ServiceError(pb.INVALID_ARGUMENT, text, "p" * 1000)
            sent = quote(error.message, safe="".join(map(chr, range(0x20, 0x7F))).replace("%", ""))
            assert MAX_MESSAGE - 12 < len(sent) <= MAX_MESSAGE
            assert error.message.endswith(f"... ({len(text)} characters)")
            again = ServiceError.from_failure(error.to_failure())
            assert (again.message, again.param) == (error.message, error.param)


def test_a_short_message_is_not_cut() -> None:
    for text in ("x" * MAX_MESSAGE, "\u4e2d" * (MAX_MESSAGE // 9)):
        assert ServiceError(pb.INVALID_ARGUMENT, text).message == text
