"""The first command of a router's session with a prefill and a decode worker."""

from collections.abc import Callable

import grpc
import pytest
from systems.cluster_secret import open_channel
from systems.worker_kit import Pair, prompt

from pdserve.protos import worker_pb2 as wire
from pdserve.protos.common_pb2 import IdsPart
from pdserve.protos.worker_pb2_grpc import DecodeStub, PrefillStub
from pdserve.services.common.rpc import PROTOCOL_VERSION


def test_a_router_of_no_neighbouring_release_is_refused_and_others_are_served(
    with_pair: Callable[..., None],
) -> None:
    async def test(pair: Pair) -> None:
        for far, worker, stub_type, command in (
            (PROTOCOL_VERSION + 2, pair.decode_worker, DecodeStub, wire.DecodeCommand),
            (0, pair.decode_worker, DecodeStub, wire.DecodeCommand),
            (PROTOCOL_VERSION + 2, pair.prefill_worker, PrefillStub, wire.PrefillCommand),
            (0, pair.prefill_worker, PrefillStub, wire.PrefillCommand),
        ):
            async with open_channel(worker.address) as channel:
                hello = wire.SessionHello(router_incarnation=b"new", protocol=far)
                call = stub_type(channel).Session(iter([command(hello=hello)]))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await anext(aiter(call))
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            version = f"protocol version {PROTOCOL_VERSION} of the worker"
            text = f"{version} does not match {far} of the router at"
            assert text in str(caught.value.details())
        attempt = await pair.hand_off(prompt(80))
        await pair.decode.wait("finished", attempt)

    with_pair(test)


def test_a_session_that_does_not_begin_with_hello_is_refused(
    with_pair: Callable[..., None],
) -> None:
    async def test(pair: Pair) -> None:
        attempt = b"a" * 16
        cancel = wire.CancelAttempt(attempt=attempt)
        for worker, stub_type, first in (
            (pair.decode_worker, DecodeStub, wire.DecodeCommand(cancel=cancel)),
            (pair.decode_worker, DecodeStub, wire.DecodeCommand(ids_part=IdsPart(key="k"))),
            (pair.prefill_worker, PrefillStub, wire.PrefillCommand(cancel=cancel)),
            (pair.prefill_worker, PrefillStub, wire.PrefillCommand()),
        ):
            async with open_channel(worker.address) as channel:
                call = stub_type(channel).Session(iter([first]))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await anext(aiter(call))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details() == "the first command of a Session call must be `hello`"
        assert pair.decode_role.core.num_stale == pair.prefill_role.core.num_stale == 0

    with_pair(test)
