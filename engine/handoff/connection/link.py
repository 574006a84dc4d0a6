"""One data connection between a prefill and a decode process: its two threads, records and credits.

Ownership: the reader thread owns the wire and closes it when both threads have ended. Only the
writer thread writes, except for records that are posted while it is idle and that the socket takes
at once. Users of a link only post. At most SLOTS frames are in flight: a slot belongs to prefill
until its frame is sent, then to decode until its Credit arrives. Decode sends the Credit when it no
longer reads the payload: on a device when the copy from the slot is done, otherwise when the
handler has returned. The two threads share one lock and end the connection together.
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
    """The callbacks of a DataLink, called on its threads; they must not block. A callback that
    raises FrameError closes the connection."""

    def introduced(self, link: "DataLink", hello: messages.Hello) -> str:
        """At decode, return why the prefill process that sent `hello` is refused; empty if it is
        accepted."""

    def message(self, link: "DataLink", message: messages.Message) -> None: ...

    def frame(self, link: "DataLink", header: FrameHeader, covered: bytes, tag: bytes) -> bool:
        """At decode, check the tag of a frame's header and return whether to receive the frame's
        payload. False skips the payload, and the connection continues."""

    def payload(self, link: "DataLink", header: FrameHeader, payload: Payload) -> None:
        """At decode, process a frame's payload, which is not verified yet. `payload` is bytes that
        stay unchanged until this method returns, or a slot on the device, which the handler must
        return by `DataLink.credit` when it no longer reads it."""

    def closed(self, link: "DataLink", reason: str) -> None:
        """Handle the end of the connection; called exactly once, whatever the cause."""


class DataLink:
    """A data connection with its reader and writer thread. Prefill opens it by `DataLink.dial`,
    decode by `DataLink(...)` and `accept()`."""

    def __init__(self, wire: Wire, transport: str, handler: DataLinkHandler) -> None:
        self.transport = transport
        self.peer = b""  # incarnation, once introduced
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
        """At prefill, send Hello on a new wire and wait for decode's Welcome. Raises
        TransportRefused."""
        link = cls(wire, transport, handler)
        link.peer = hello.decode_incarnation
        try:
            wire.deadline = time.monotonic() + timeout_s
            wire.write(messages.encode(hello))
            match link._read_control(link._read_prefix()):
                case messages.Welcome(proof) if proof == wire.proof():
                    wire.trust()
                case messages.Welcome():
                    raise TransportRefused(
                        "decode cannot read the bytes that prefill wrote into the window"
                    )
                case messages.Refused(reason):
                    raise TransportRefused(f"refused by decode: {reason}")
                case _:
                    raise TransportRefused("decode answered Hello with an unexpected message")
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
        """At decode, start the connection's threads; the reader thread then waits for the peer's
        Hello. The connection uses little memory until `trust`. Raises RuntimeError if no thread can
        be started."""
        self._wire.deadline = time.monotonic() + INTRODUCTION_S
        self._start()

    @property
    def heard(self) -> float:
        """Time at which the last byte of the peer arrived (time.monotonic)."""
        return self._wire.heard

    @property
    def host(self) -> str:
        """The peer's IP address; empty on a unix socket."""
        return self._wire.host

    @property
    def open(self) -> bool:
        return not self._reason

    @property
    def direct(self) -> bool:
        """Whether payloads go from prefill's block pool to decode's on a device, without passing
        the host."""
        return self._wire.direct

    @property
    def slot_bytes(self) -> int:
        """Size of the largest payload that a frame of this connection may have, in bytes."""
        return self._wire.slot_bytes

    @property
    def ended(self) -> bool:
        """Whether both threads of the connection have ended and its socket is closed."""
        return not self.open and not self._reader.is_alive()

    def take_busy_s(self) -> float:
        """Return the seconds that the connection spent moving payloads since the last call."""
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    @property
    def genuine(self) -> bool:
        return self._genuine

    def trust(self) -> None:
        """At decode, lift the limits of an unproven peer, which has now proven that it knows a
        ticket's secret; called on the reader thread."""
        if not self._genuine:
            self._genuine = True
            self._wire.trust()
            if window := self._wire.window():
                self.post(messages.encode(messages.SlotWindow(window)))

    def post(self, record: bytes) -> None:
        """Send a control record before any queued frame; never blocks. A closed connection drops
        the record."""
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
        """Write posted records without blocking, while the writer thread is idle; the caller holds
        the lock. Return why the wire is closed; empty if it is open."""
        if not self._reason:
            try:
                self._wire.write_some(self._posted, socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            except WireClosed as err:
                return str(err)
        return ""

    def push(self, *jobs: FrameJob) -> None:
        """Queue jobs that build frames; the writer thread runs each job when a slot is free."""
        with self._wake:
            self._jobs.extend(jobs)
            self._wake.notify()

    def credit(self, header: FrameHeader) -> None:
        """At decode, return to prefill the slot of a frame whose payload arrived on the device.
        Raises KeyError if it was returned before."""
        self.post(_credit(header.slot, self._lent.credit(header.slot)))

    def slot_returned(self, slot: int, mark: bytes) -> bool:
        """At prefill, free a frame's slot, since decode no longer needs it. Return False if the
        slot was freed before or holds another frame.

        Called for a Credit and also for an answer to the frame (Ack, Nack, Complete), since neither
        is certain to arrive: a Credit may be damaged on the way, and a frame of an ended attempt
        gets no answer.
        """
        with self._wake:
            if not self._slots.expects(slot, mark):
                return False
            self._slots.credited(slot)
            self._wake.notify()
        return True

    def close(self, reason: str = "closed locally") -> None:
        """End the connection and wait for its threads, unless called on one of them."""
        self.end(reason)
        on_link_thread = threading.current_thread() in (self._reader, self._writer)
        if self._reader.is_alive() and not on_link_thread:
            self._reader.join()

    def end(self, reason: str) -> None:
        """Make both threads of the connection end, without waiting for them. Only the first call
        counts; its `reason` is passed to the handler's `closed`."""
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
            log.exception("a hand-off connection failed with an unexpected error and is closed")
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
            raise FrameError("the peer's first message is not Hello")
        self.hello = hello
        reason = self._handler.introduced(self, hello)
        if not reason and hello.transport != self.transport:
            reason = f"the peer names transport {hello.transport} on a {self.transport} listener"
        try:
            reply = messages.Refused(reason) if reason else messages.Welcome(self._wire.proof())
        except TransportRefused as err:
            reply = messages.Refused(str(err))
        self.peer = hello.prefill_incarnation
        if isinstance(reply, messages.Refused):
            self._wire.write(messages.encode(reply))  # the writer has nothing to send yet
            raise TransportRefused(reply.reason)
        self.post(messages.encode(reply))

    def _skip_rest(self) -> None:
        """Read and drop bytes until the peer closes. Closing the socket first would reset the
        connection, and the peer might lose the answer that was just sent."""
        with contextlib.suppress(WireClosed):
            while True:
                self._wire.take(1)

    def _read_and_credit(self) -> None:
        """Read one record; send the collected credits if no further record waits, or if there are
        many."""
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
            raise FrameError("prefill sent a payload that is larger than a slot")
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
        """Add a Credit for a slot to those that are sent together: each write wakes a thread of the
        peer."""
        self._credits.append(_credit(slot, mark))

    def _open_window(self, window: bytes) -> None:
        """At prefill, open decode's window of device memory, which makes the slots available."""
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
            log.exception("a hand-off connection failed with an unexpected error and is closed")
            self.end("internal error")

    def _next(self) -> bytes | tuple[int, FrameJob] | None:
        with self._wake:
            self._writing = False
            while (work := self._next_work()) is None and not self._reason:
                self._wake.wait()
            self._writing = True
            return work

    def _next_work(self) -> bytes | tuple[int, FrameJob] | None:
        """Return what the writer thread writes next: control records, or a free slot with the job
        that builds its frame. None if there is nothing to write or the connection has ended."""
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
