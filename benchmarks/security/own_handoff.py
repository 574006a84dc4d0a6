"""One hand-off between real workers, requested by this program as a router: it prints the ticket
that it received, so that a search for that ticket can be shown to find it.

    python own_handoff.py ROUTER DECODE PREFILL [FOLDER]

Addresses, and the folder of certificates; without one the secret is sent. It prints JSON.
"""

import json
import os
import queue
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roles import access_of

from pdserve.protos import common_pb2, router_pb2, worker_pb2
from pdserve.protos.router_pb2_grpc import RouterStub
from pdserve.protos.worker_pb2_grpc import DecodeStub, PrefillStub
from pdserve.services.host.auth.roles import Role

TOKENS, VOCABULARY = 400, 40_000
SECONDS = 60


class Session:
    """A router's end of a session with a worker."""

    def __init__(self, stub: Any, metadata: Any) -> None:
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        commands = iter(self._commands.get, None)
        self._call = stub.Session(commands, metadata=metadata, timeout=SECONDS)
        self._events = self._each()

    def send(self, command: Any) -> None:
        self._commands.put(command)

    def wait(self, kind: str) -> Any:
        """Wait for the next event of a kind."""
        for event in self._events:
            if event.WhichOneof("event") == kind:
                return getattr(event, kind)
        raise RuntimeError(f"the session ended without {kind}")

    def _each(self) -> Iterator[Any]:
        for message in self._call:
            yield from message.events


def hand_off(router: str, decode: str, prefill: str, folder: Path | None) -> dict[str, Any]:
    gateway, own = access_of(Role.GATEWAY, folder), access_of(Role.ROUTER, folder)
    with gateway.open_blocking_channel(router, Role.ROUTER) as channel:
        asked = router_pb2.GetFleetRequest()
        view = RouterStub(channel).GetFleet(asked, metadata=gateway.metadata, timeout=SECONDS)
    hellos = {worker.hello.address: worker.hello for worker in view.workers}
    card, prefill_boot = hellos[decode].card, hellos[prefill].boot
    attempt, boot = os.urandom(16), os.urandom(16)
    ids = [random.randrange(100, VOCABULARY) for _ in range(TOKENS)]
    start = common_pb2.Start(
        request=attempt.hex(),
        epoch=1,
        model=card.name,
        prompt_ids=ids,
        params=common_pb2.SamplingParams(temperature=0, max_tokens=2),
        seed=1,
        remaining_ms=SECONDS * 1000,
    )
    with (
        own.open_blocking_channel(decode, Role.DECODE) as to_decode,
        own.open_blocking_channel(prefill, Role.PREFILL) as to_prefill,
    ):
        decoding = Session(DecodeStub(to_decode), own.metadata)
        hello = worker_pb2.SessionHello(router_boot=boot)
        decoding.send(worker_pb2.DecodeCommand(hello=hello))
        admit = worker_pb2.Admit(attempt=attempt, start=start, prefill_boot=prefill_boot)
        admit.prefill_identity = card.kv_identity.digest
        decoding.send(worker_pb2.DecodeCommand(admit=admit))
        ticket = decoding.wait("admitted").ticket
        prefilling = Session(PrefillStub(to_prefill), own.metadata)
        prefilling.send(worker_pb2.PrefillCommand(hello=hello))
        begin = worker_pb2.PrefillStart(attempt=attempt, ids=ids[:-1], ticket=ticket)
        begin.kv_identity.CopyFrom(card.kv_identity)
        prefilling.send(worker_pb2.PrefillCommand(start=begin))
        prefilling.wait("done")
        decoding.wait("finished")
    ticket_parts = {
        "id": ticket.id,
        "secret": ticket.secret,
        "attempt": attempt,
        "prefill_boot": prefill_boot,
        "decode_boot": ticket.decode_boot,
    }
    return {"ids": ids, "ticket": {name: part.hex() for name, part in ticket_parts.items()}}


if __name__ == "__main__":
    router, decode, prefill, *folder = sys.argv[1:]
    print(json.dumps(hand_off(router, decode, prefill, Path(folder[0]) if folder else None)))
