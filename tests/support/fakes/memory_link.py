"""A data connection in memory, whose owner decides when each record arrives; no threads."""

from collections import deque
from collections.abc import Callable
from typing import Any

from pdserve.engine.handoff.protocol import FrameError, FrameHeader, messages
from pdserve.engine.transport import SLOTS

Frame = tuple[bytes, bytes]  # signed record, payload


class MemoryLink:
    """One end; replaces a Link (engine/handoff/connection/link.py). Ends are tied by `tie`."""

    transport = "memory"
    direct = False

    def __init__(self, handler: Any, peer: bytes, slot_bytes: int, clock: Callable[[], float]):
        self.handler = handler
        self.peer = peer
        self.hello: messages.Hello | None = None
        self.genuine = False
        self.reason = ""
        self.heard = clock()
        self.inbox: deque[bytes] = deque()  # records on their way here
        self.frames: list[Frame] = []  # frames on their way here
        self.jobs: deque[Any] = deque()
        self.free = deque(range(SLOTS))
        self.other: MemoryLink = self
        self.slot_bytes = slot_bytes
        self._clock = clock

    @property
    def open(self) -> bool:
        return not self.reason

    @property
    def ended(self) -> bool:
        return not self.open

    # methods for a Sender or a Receiver

    def post(self, record: bytes) -> None:
        if self.open:
            self.other.inbox.append(record)

    def push(self, *jobs: Any) -> None:
        self.jobs.extend(jobs)

    def trust(self) -> None:
        self.genuine = True

    def credit(self, header: FrameHeader) -> None:
        if header.slot not in self.other.free:
            self.other.free.append(header.slot)

    def slot_returned(self, slot: int, mark: bytes) -> bool:
        return False

    def take_busy_s(self) -> float:
        return 0.0

    def end(self, reason: str) -> None:
        if self.open:
            self.reason = reason
            self.handler.closed(self, reason)

    def close(self, reason: str = "closed locally") -> None:
        self.end(reason)

    # methods for its owner

    def hear(self) -> messages.Message | None:
        """Deliver the next record; None: the end has closed the connection."""
        message = messages.decode(self.inbox.popleft())
        self.heard = self._clock()
        return message if self._safely(lambda: self.handler.message(self, message)) else None

    def write_frame(self) -> bool:
        """Read, sign and send the next frame, if a slot is free; False: it was given up."""
        with self.jobs.popleft()(slot := self.free.popleft(), None) as frame:
            if frame is None:
                self.free.appendleft(slot)
                return False
            self.other.frames.append((frame.record, b"".join(frame.parts)))
        return True

    def hear_frame(self, frame: Frame) -> bool:
        """Deliver the next frame; False: the end has closed the connection."""
        record, payload = frame
        self.heard = self._clock()

        def read() -> None:
            header, covered, tag = FrameHeader.unpack(record)
            if self.handler.frame(self, header, covered, tag):
                self.handler.payload(self, header, memoryview(bytearray(payload)))
            self.credit(header)

        return self._safely(read)

    def _safely(self, read: Callable[[], None]) -> bool:
        try:
            read()
        except FrameError as err:
            self.end(str(err))
            return False
        return True


def tie(one: MemoryLink, other: MemoryLink) -> None:
    one.other, other.other = other, one
