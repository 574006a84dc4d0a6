"""Sessions to a decode worker that break, and others that resume their requests."""

import asyncio
from collections.abc import Sequence
from typing import Any

from pdserve.protos import worker_pb2 as wire
from pdserve.protos.worker_pb2_grpc import DecodeStub
from pdserve.services.decode.leases import LeaseFigures
from systems.eventually import eventually
from systems.worker_kit import Pair, SessionClient

EPOCH = 3  # of every Admit


def figures(pair: Pair) -> LeaseFigures:
    return pair.decode_role.core.leases.figures


async def engine_stats(pair: Pair) -> Any:
    part: Any = pair.decode_worker.runtime
    return await asyncio.wrap_future(part.thread.post(lambda engine: engine.stats()))


async def load(pair: Pair) -> Any:
    """Return the Load that routers receive."""
    part: Any = pair.decode_worker.runtime
    return (await asyncio.wrap_future(part.thread.post(lambda _: part.snapshot())))[0]


async def lose(pair: Pair) -> None:
    """Break the session as a dead router would; its requests are parked."""
    served = pair.decode_role.core.num_served
    await pair.decode.close()
    await eventually(lambda: figures(pair).parked == served)


def another(pair: Pair) -> SessionClient:
    return SessionClient(DecodeStub, pair.decode_worker.address)


def served_by(pair: Pair, attempt: bytes) -> Any:
    return pair.decode_role.core._served[attempt]


def ask_again(
    client: SessionClient, attempt: bytes, counts: Sequence[int] = (), epoch: int = EPOCH + 1
) -> None:
    resume = wire.Resume(attempt=attempt, epoch=epoch, counts=counts)
    client.send(wire.DecodeCommand(resume=resume))


def heard(client: SessionClient, attempt: bytes) -> dict[int, dict[int, tuple[int, str]]]:
    """Return by choice and position: (id, log-probability)."""
    found: dict[int, dict[int, tuple[int, str]]] = {}
    for kind, message in client.events:
        if kind == "tokens" and message.attempt == attempt:
            choice = found.setdefault(message.choice, {})
            for at, token in enumerate(message.ids):
                scores = message.logprobs
                choice[message.position + at] = (token, str(scores[at]) if scores else "")
    return found
