"""A router of another release at a prefill and a decode worker."""

from collections.abc import Callable

import grpc
import pytest
from systems.cluster_secret import open_channel
from systems.worker_kit import Pair, prompt

from pdserve.protos import worker_pb2 as wire
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
