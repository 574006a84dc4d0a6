"""A peer of a running decode process: it introduces itself as prefill does, with or without a
ticket.

With `admitted` decode makes a ticket, as for a router.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import grpc
from systems.eventually import LIMIT_S

from pdserve.engine.handoff.protocol import (
    PREFIX_BYTES,
    FrameHeader,
    Prefix,
    Ticket,
    derive_keys,
    messages,
    slot_bytes,
)
from pdserve.engine.kv import KvIdentity, decode_spec, spec_digest
from pdserve.engine.transport import Target, TransportOptions, WireClosed, make_transports
from pdserve.protos import common_pb2, fleet_pb2, worker_pb2
from pdserve.protos.worker_pb2_grpc import DecodeStub
from pdserve.services.common.rpc import PROTOCOL_VERSION

PROMPT = range(100, 160)


class KvPeer:
    """A connection by a transport, introduced with an incarnation; it knows everything that decode
    reports to routers about itself.
    """

    def __init__(
        self, decode: fleet_pb2.WorkerHello, transport: str, shm_dir: str, incarnation: bytes
    ) -> None:
        self._spec = decode_spec(decode.card.kv_spec)
        self._identity = KvIdentity.of(decode.card.kv_identity)
        options = TransportOptions(shm_dir=shm_dir, slot_bytes=slot_bytes(self._spec))
        (made,) = make_transports(transport, options)
        self.wire = made.dial(Target(decode.data_address, decode.incarnation), LIMIT_S)
        self.wire.deadline = time.monotonic() + LIMIT_S
        spec = decode.card.kv_spec
        hello = messages.Hello(incarnation, decode.incarnation, self._identity, transport, spec)
        self.wire.write(messages.encode(hello))
        self.welcome = self.reply()

    def reply(self) -> messages.Message | None:
        """Return the next record; None: decode has closed the connection. Raises TimeoutError."""
        try:
            head = self.wire.take(PREFIX_BYTES)
            return messages.decode(head + self.wire.take(Prefix.unpack(head).length))
        except WireClosed as error:
            assert self.wire.deadline is not None
            if time.monotonic() >= self.wire.deadline:
                raise TimeoutError("decode has not closed the connection") from error
            return None

    def claim(self, ticket: Ticket) -> messages.Message | messages.Body | None:
        """Return decode's answer to a claim of PROMPT."""
        keys = derive_keys(ticket, spec_digest(self._spec), self._identity.digest)
        claim = messages.Claim(len(PROMPT) - 1, 0)
        self.wire.write(messages.sign(claim, ticket.id, 1, keys.to_decode))
        while isinstance(answer := self.reply(), messages.Signed):
            if not isinstance(answer.body, messages.Progress):
                return answer.body
        return answer

    def send_frame(self) -> None:
        """Send a frame without a ticket."""
        header = FrameHeader(bytes(16), 1, 0, 0, range(1), range(16), range(1), 1, bytes(16))
        self.wire.write(header.pack() + bytes(16))

    def close(self) -> None:
        self.wire.close()


def guessed(decode: fleet_pb2.WorkerHello, incarnation: bytes, id: bytes = b"") -> Ticket:
    """Return a ticket that decode has not made, or one of its tickets with only the id."""
    return Ticket(
        id or os.urandom(16), os.urandom(32), os.urandom(16), incarnation, decode.incarnation
    )


@contextmanager
def admitted(channel: grpc.Channel, incarnation: bytes) -> Iterator[Ticket]:
    """Return the ticket of a hand-off of PROMPT from that incarnation, while it lasts. The channel
    is a router's to decode.
    """
    attempt = os.urandom(16)
    params = common_pb2.SamplingParams(max_tokens=1)
    start = common_pb2.Start(request="a request", prompt_ids=PROMPT, params=params, seed=1)
    admit = worker_pb2.Admit(attempt=attempt, start=start, prefill_incarnation=incarnation)
    cancel = worker_pb2.CancelAttempt(attempt=attempt)
    commands: SimpleQueue[worker_pb2.DecodeCommand | None] = SimpleQueue()
    hello = worker_pb2.SessionHello(router_incarnation=bytes(16), protocol=PROTOCOL_VERSION)
    commands.put(worker_pb2.DecodeCommand(hello=hello))
    commands.put(worker_pb2.DecodeCommand(admit=admit))
    call = DecodeStub(channel).Session(iter(commands.get, None), timeout=LIMIT_S)
    try:
        event = next(event for message in call for event in message.events)
        ticket = event.admitted.ticket
        yield Ticket(ticket.id, ticket.secret, attempt, incarnation, ticket.decode_incarnation)
    finally:
        commands.put(worker_pb2.DecodeCommand(cancel=cancel))
        commands.put(None)
        for _ in call:
            pass
