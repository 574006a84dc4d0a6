"""One connection between a prefill and a decode process: its two threads, records and credits.

Ownership: the reader thread owns the wire and closes it when both threads have ended. Only the
writer thread writes, except for records that are posted while it is idle and that the socket takes
at once. Users of a link only post. At most SLOTS frames are in flight: a slot belongs to prefill
until its frame is sent, then to decode until its Credit arrives. Decode sends the Credit when
nothing reads the payload any more: on a device when the copy from the slot is done, otherwise when
the handler has returned. The two threads share one lock and end the connection together.
"""

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from contextlib import ExitStack
from typing import Protocol

from pdserve.engine.handoff.connection.slots import ReaderSlots, WriterSlots
from pdserve.engine.handoff.protocol import (
    FRAME_TYPE,
    PREFIX_BYTES,
    FrameError,
    FrameHeader,
    OtherVersion,
    Prefix,
    mark_of,
    messages,
)
from pdserve.engine.transport import SLOTS, FrameJob, Payload, TransportRefused, Wire, WireClosed

log = logging.getLogger(__name__)

INTRODUCTION_S = 5.0  # from accept to the first genuine message
MAX_POSTED = 4096  # control records that may wait for a peer that does not read


class DataLinkHandler(Protocol):
    """Handles a link's events on its threads, without blocking. A FrameError closes the link."""

    def introduced(self, link: "DataLink", hello: messages.Hello) -> str:
        """decode: return why this peer is refused; empty if it is accepted."""

    def message(self, link: "DataLink", message: messages.Message) -> None: ...

    def frame(self, link: "DataLink", header: FrameHeader, covered: bytes, tag: bytes) -> bool:
        """decode: check the header's tag and return whether to receive the payload. If not, it is
        skipped, and the connection continues."""

    def payload(self, link: "DataLink", header: FrameHeader, payload: Payload) -> None:
        """decode: process an unverified payload: bytes that stay unchanged until the call returns,
        or a slot on the device, which the handler must `credit` when it no longer reads it."""

    def closed(self, link: "DataLink", reason: str) -> None:
        """Handle the end of the link; called once, whatever the cause."""


class DataLink:
    """A connection. Prefill uses `DataLink.dial`; decode uses `DataLink(...)`, then `accept()`."""

    def __init__(self, wire: Wire, transport: str, handler: DataLinkHandler) -> None:
        self.transport = transport
        self.peer = b""  # boot id, once introduced
        self.hello: messages.Hello | None = None  # decode: the peer's introduction
        self._wire = wire
        self._handler = handler
        self._wake = threading.Condition()
        self._posted: deque[memoryview] = deque()
        self._writing = True  # the writer thread has work, or has not begun
        self._jobs: deque[FrameJob] = deque()
        self._slots = WriterSlots(SLOTS if wire.writable else 0)  # at prefill
        self._lent = ReaderSlots(SLOTS)  # at decode
        self._credits: list[bytes] = []  # decode's reader thread: records to post
        self._genuine = False
        self._reason = ""
        self._busy_s = 0.0  # seconds spent moving payloads since take_busy_s
        self._reader = threading.Thread(target=self._read_loop, name=f"kv-{transport}-read")
        self._writer = threading.Thread(target=self._write_loop, name=f"kv-{transport}-write")

    @classmethod
    def dial(
        cls,
        wire: Wire,
        transport: str,
        handler: DataLinkHandler,
        hello: messages.Hello,
        timeout_s: float,
    ) -> "DataLink":
        """prefill: send Hello on a new wire and wait for Welcome. Raises TransportRefused."""
        link = cls(wire, transport, handler)
        link.peer = hello.decode_boot
        try:
            wire.deadline = time.monotonic() + timeout_s
            wire.write(messages.encode(hello))
            match link._read_control(link._read_prefix()):
                case messages.Welcome(proof) if proof == wire.proof():
                    wire.trust()
                case messages.Welcome():
                    raise TransportRefused("decode cannot read this process's window")
                case messages.Refused(reason):
                    raise TransportRefused(f"refused by decode: {reason}")
                case _:
                    raise TransportRefused("decode did not answer with Welcome")
        except (WireClosed, FrameError) as err:
            wire.close()
            raise TransportRefused(str(err)) from None
        except TransportRefused:
            wire.close()
            raise
        link._genuine = True
        try:
            link._start()
        except RuntimeError as err:
            raise TransportRefused(str(err)) from None
        return link

    def accept(self) -> None:
        """decode: start the threads; the reader waits for Hello. Memory stays small until `trust`.
        Raises RuntimeError if the system has no thread for it."""
        self._wire.deadline = time.monotonic() + INTRODUCTION_S
        self._start()

    @property
    def heard(self) -> float:
        """When the last byte arrived (time.monotonic)."""
        return self._wire.heard

    @property
    def host(self) -> str:
        """The peer's address; empty on a unix socket."""
        return self._wire.host

    @property
    def open(self) -> bool:
        return not self._reason

    @property
    def direct(self) -> bool:
        """Whether payloads go from pool to pool on a device."""
        return self._wire.direct

    @property
    def slot_bytes(self) -> int:
        """The largest payload."""
        return self._wire.slot_bytes

    @property
    def ended(self) -> bool:
        """Whether the threads have ended and the socket is closed."""
        return not self.open and not self._reader.is_alive()

    def take_busy_s(self) -> float:
        """Return the seconds spent moving payloads since the last call."""
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    @property
    def genuine(self) -> bool:
        return self._genuine

    def trust(self) -> None:
        """decode: lift the limits of an unproven peer; called on the reader thread."""
        if not self._genuine:
            self._genuine = True
            self._wire.trust()
            if window := self._wire.window():
                self.post(messages.encode(messages.SlotWindow(window)))

    def post(self, record: bytes) -> None:
        """Send a control record before waiting frames; never blocks. A closed link drops it."""
        failure = ""
        with self._wake:
            self._posted.append(memoryview(record))
            if len(self._posted) > MAX_POSTED:
                failure = "the peer does not read its messages"
            elif not self._writing:
                failure = self._write_now()
            if self._posted:
                self._wake.notify()
        if failure:
            self.end(failure)

    def _write_now(self) -> str:
        """Write while the writer thread is idle, under the lock; return why the wire is closed."""
        if not self._reason:
            try:
                self._wire.write_some(self._posted, socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            except WireClosed as err:
                return str(err)
        return ""

    def push(self, *jobs: FrameJob) -> None:
        """Queue frames; their jobs run on the writer thread, each when a slot is free."""
        with self._wake:
            self._jobs.extend(jobs)
            self._wake.notify()

    def credit(self, header: FrameHeader) -> None:
        """decode, direct: return a frame's slot. Raises KeyError if it was returned before."""
        self.post(_credit(header.slot, self._lent.credit(header.slot)))

    def slot_returned(self, slot: int, mark: bytes) -> bool:
        """prefill: record that decode no longer needs the slot of a frame; return False if that was
        known, or if another frame is in the slot.

        Both the Credit and an answer to the frame report this: a Credit may be damaged on the way,
        and a frame of an ended attempt gets no answer.
        """
        with self._wake:
            if not self._slots.expects(slot, mark):
                return False
            self._slots.credited(slot)
            self._wake.notify()
        return True

    def close(self, reason: str = "closed locally") -> None:
        """End the link and wait for its threads, unless called on one of them."""
        self.end(reason)
        on_link_thread = threading.current_thread() in (self._reader, self._writer)
        if self._reader.is_alive() and not on_link_thread:
            self._reader.join()

    def end(self, reason: str) -> None:
        """Make both threads end; never waits. The first reason counts."""
        with self._wake:
            if self._reason:
                return
            self._reason = reason
            self._wake.notify_all()
        self._wire.interrupt()
        self._handler.closed(self, reason)

    def _start(self) -> None:
        try:
            self._writer.start()
            self._reader.start()
        except RuntimeError as err:
            self.end(str(err))
            if self._writer.is_alive():
                self._writer.join()
            self._wire.close()
            raise

    # the reader thread

    def _read_loop(self) -> None:
        try:
            if not self._genuine:
                self._check_hello()
            while True:
                self._read_and_credit()
        except (WireClosed, FrameError, TransportRefused) as err:
            self.end(str(err))
        except Exception:
            log.exception("a hand-off connection failed")
            self.end("internal error")
        finally:
            self._writer.join()
            self._wire.close()

    def _check_hello(self) -> None:
        self._wire.setup()
        try:
            hello = self._read_control(self._read_prefix())
        except OtherVersion as err:  # the peer finds the local version in the answer and reports it
            self._wire.write(messages.encode(messages.Refused(str(err))))
            self._skip_rest()
            raise
        if not isinstance(hello, messages.Hello):
            raise FrameError("the first message is not Hello")
        self.hello = hello
        reason = self._handler.introduced(self, hello)
        if not reason and hello.transport != self.transport:
            reason = f"the peer names transport {hello.transport} on a {self.transport} listener"
        try:
            reply = messages.Refused(reason) if reason else messages.Welcome(self._wire.proof())
        except TransportRefused as err:
            reply = messages.Refused(str(err))
        self.peer = hello.prefill_boot
        if isinstance(reply, messages.Refused):
            self._wire.write(messages.encode(reply))  # the writer has nothing to send yet
            raise TransportRefused(reply.reason)
        self.post(messages.encode(reply))

    def _skip_rest(self) -> None:
        """Read until the peer closes: closing first would reset it and lose the answer."""
        with contextlib.suppress(WireClosed):
            while True:
                self._wire.take(1)

    def _read_and_credit(self) -> None:
        """Read a record, then post the credits if no more records wait."""
        self._read_record()
        if len(self._credits) >= SLOTS // 2 or (self._credits and not self._wire.readable):
            self.post(b"".join(self._credits))
            self._credits.clear()

    def _read_record(self) -> None:
        prefix = self._read_prefix()
        if prefix.type == FRAME_TYPE:
            self._read_frame(prefix)
            return
        message = self._read_control(prefix)
        if isinstance(message, messages.Credit):  # ignored if doubled, damaged or after an answer
            self.slot_returned(message.slot, message.mark)
        elif isinstance(message, messages.SlotWindow):
            self._open_window(message.data)
        else:
            self._handler.message(self, message)

    def _read_prefix(self) -> Prefix:
        return Prefix.unpack(self._wire.take(PREFIX_BYTES))

    def _read_control(self, prefix: Prefix) -> messages.Message:
        return messages.decode(prefix.pack() + self._wire.take(prefix.length))

    def _read_frame(self, prefix: Prefix) -> None:
        if not self._genuine:
            raise FrameError("a frame arrived before a verified Claim")
        record = prefix.pack() + self._wire.take(prefix.length)
        header, covered, tag = FrameHeader.unpack(record)
        if header.payload_bytes > self._wire.slot_bytes:
            raise FrameError("the payload is larger than a slot")
        mark, lent = mark_of(tag), self._lent.check(header.slot)
        if not self._handler.frame(self, header, covered, tag):
            self._wire.skip_payload(header.slot, header.payload_bytes)
            if not lent:  # otherwise the frame came twice, and the first one will be credited
                self._give_back(header.slot, mark)
            return
        self._lent.lend(header.slot, mark)
        start = time.monotonic()
        payload = self._wire.payload(header.slot, header.payload_bytes)
        self._handler.payload(self, header, payload)
        self._busy_s += time.monotonic() - start
        if not self._wire.direct:
            self._give_back(header.slot, self._lent.credit(header.slot))

    def _give_back(self, slot: int, mark: bytes) -> None:
        """Collect a credit; several go out in one write, since each write wakes a thread."""
        self._credits.append(_credit(slot, mark))

    def _open_window(self, window: bytes) -> None:
        """prefill: open the window, which makes the slots available."""
        self._wire.open_window(window)
        with self._wake:
            self._slots.open(SLOTS)
            self._wake.notify()

    # the writer thread

    def _write_loop(self) -> None:
        try:
            while (work := self._next()) is not None:
                self._write(work)
        except WireClosed as err:
            self.end(str(err))
        except Exception:
            log.exception("a hand-off connection failed")
            self.end("internal error")

    def _next(self) -> bytes | tuple[int, FrameJob] | None:
        with self._wake:
            self._writing = False
            while (work := self._next_work()) is None and not self._reason:
                self._wake.wait()
            self._writing = True
            return work

    def _next_work(self) -> bytes | tuple[int, FrameJob] | None:
        """Return what to write now; None if there is nothing, or if the link has ended."""
        if self._reason:
            return None
        if self._posted:
            records = b"".join(self._posted)
            self._posted.clear()
            return records
        if self._jobs and self._slots.num_free:
            return self._slots.take(), self._jobs.popleft()
        return None

    def _write(self, work: bytes | tuple[int, FrameJob]) -> None:
        if isinstance(work, bytes):
            self._wire.write(work)
        else:
            self._write_frame(*work)

    def _write_frame(self, slot: int, job: FrameJob) -> None:
        with ExitStack() as stack:
            frame = stack.enter_context(job(slot, self._wire.sink(slot)))
            with self._wake:
                if frame is None:
                    self._slots.put_back(slot)
                    return
                self._slots.sent(slot, mark_of(frame.record))
            start = time.monotonic()
            self._wire.send_frame(frame.record, slot, frame.parts, stack.close)
            self._busy_s += time.monotonic() - start


def _credit(slot: int, mark: bytes) -> bytes:
    return messages.encode(messages.Credit(slot, mark))
