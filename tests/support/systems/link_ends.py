"""Two ends of a connection in one process, with handlers that record what they see."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes.device import FakeDevice, pages_of

from pdserve.engine.handoff.connection import DataLink
from pdserve.engine.handoff.protocol import TAG_BYTES, FrameHeader, TagKey, messages
from pdserve.engine.kv import KvIdentity
from pdserve.engine.transport import (
    DeviceSink,
    Frame,
    FrameJob,
    KvTransport,
    Payload,
    Target,
    TransportOptions,
    Wire,
)
from pdserve.engine.transport.base import transports
from systems.eventually import LIMIT_S

SLOT_BYTES = 1 << 18
INCARNATION = b"D" * 16
TICKET = b"t" * 16
COPY_KEY = bytes(range(32))  # of every payload on a device
HELLO = messages.Hello(b"P" * 16, INCARNATION, KvIdentity(b"identity"), "", b"spec")


def make_transport(name: str, folder: Path, device: FakeDevice | None = None) -> KvTransport:
    made = device or FakeDevice()
    options = TransportOptions("127.0.0.1:0", str(folder), SLOT_BYTES, lambda: made, SLOT_BYTES)
    return transports()[name](options)


def frame_job(payload: bytes, sequence: int) -> FrameJob:
    """Return an unsigned frame, for tests of transports only: a Receiver would refuse it."""

    @contextmanager
    def build(slot: int, sink: DeviceSink | None) -> Iterator[Frame]:
        if sink is not None:
            source = np.zeros(_padded(len(payload)), np.uint8)
            source[: len(payload)] = np.frombuffer(payload, np.uint8)
            sink.copy_out(pages_of(source), COPY_KEY).wait()
        header = FrameHeader(
            TICKET, sequence, slot, 0, range(1), range(1), range(1), len(payload), bytes(16)
        )
        yield Frame(header.pack() + bytes(TAG_BYTES), [] if sink else [memoryview(payload)])

    return build


def slots_returned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return whether a slot came back, for each Credit and each answer at prefill that reports
    one.
    """
    returned: list[bool] = []
    slot_returned = DataLink.slot_returned

    def noted(link: DataLink, slot: int, mark: bytes) -> bool:
        returned.append(slot_returned(link, slot, mark))
        return returned[-1]

    monkeypatch.setattr(DataLink, "slot_returned", noted)
    return returned


class Recorder:
    """A LinkHandler. At decode every Claim is trusted, and every payload taken at once, except
    from `hold` to `go_on`: then slots on a device are not credited, and the thread of a connection
    does not return with a payload.
    """

    def __init__(self, refuse: str = "", accept: bool = True) -> None:
        self.refuse = refuse
        self.accept = accept
        self.messages: list[messages.Message] = []
        self.payloads: list[tuple[int, bytes]] = []
        self.held: list[tuple[DataLink, FrameHeader]] = []
        self._free = threading.Event()
        self._free.set()
        self.reasons: list[str] = []
        self.links: list[DataLink] = []
        self.wires: list[Wire] = []  # of the links

    def introduced(self, link: DataLink, hello: messages.Hello) -> str:
        return self.refuse

    def message(self, link: DataLink, message: messages.Message) -> None:
        if isinstance(message, messages.Signed) and isinstance(message.body, messages.Claim):
            link.trust()
        self.messages.append(message)

    def frame(self, link: DataLink, header: FrameHeader, covered: bytes, tag: bytes) -> bool:
        return self.accept

    def payload(self, link: DataLink, header: FrameHeader, payload: Payload) -> None:
        if isinstance(payload, memoryview):
            data = bytes(payload)
        else:
            assert payload.ready()
            target = np.zeros(_padded(header.payload_bytes), np.uint8)
            copy = payload.copy_in(pages_of(target), COPY_KEY)
            copy.wait()
            data = target.tobytes()[: header.payload_bytes] if copy.intact else b"damaged"
        self.payloads.append((header.sequence, data))
        if not link.direct:
            assert self._free.wait(LIMIT_S)
        elif self._free.is_set():
            link.credit(header)
        else:
            self.held.append((link, header))

    def hold(self) -> None:
        self._free.clear()

    def go_on(self) -> None:
        self._free.set()
        for link, header in self.held:
            link.credit(header)

    def closed(self, link: DataLink, reason: str) -> None:
        self.reasons.append(reason)


class Ends:
    """A listener with its recorder; `dial` opens connections to it."""

    def __init__(self, name: str, folder: Path, device: FakeDevice | None = None) -> None:
        self.transport = make_transport(name, folder, device)
        self.decode = Recorder()
        self.listener = self.transport.listen(INCARNATION, self._accepted)
        address = self.listener.address if name == "tcp" else ""
        self.target = Target(address, INCARNATION)
        self._dialed: list[DataLink] = []

    def dial(self, handler: Recorder, claim: bool = True) -> DataLink:
        wire = self.transport.dial(self.target, 1.0)
        name = self.transport.name
        link = DataLink.dial(wire, name, handler, replace(HELLO, transport=name), 1.0)
        self._dialed.append(link)
        if claim:
            link.post(claim_record())
        return link

    def close(self) -> None:
        self.listener.close()
        for link in self._dialed + self.decode.links:
            link.close()
        self.transport.close()

    def _accepted(self, wire: Wire) -> None:
        link = DataLink(wire, self.transport.name, self.decode)
        self.decode.wires.append(wire)
        self.decode.links.append(link)
        link.accept()


def _padded(size: int) -> int:
    """Return a length padded to units of 16 bytes, which devices copy."""
    return -(-size // 16) * 16


def claim_record() -> bytes:
    return messages.sign(messages.Claim(7, 0), TICKET, 1, TagKey(bytes(32)))


def record_of(payload: bytes, sequence: int) -> bytes:
    """Return the unsigned record of a frame in slot 0."""
    with frame_job(payload, sequence)(0, None) as frame:
        assert frame is not None
        return frame.record
