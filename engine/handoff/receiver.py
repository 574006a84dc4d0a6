"""Decode's side of a hand-off: promises blocks, grants Claims in turn, writes frames into the
blocks and commits them to the engine.

The engine thread runs the machine and owns every attempt. A connection's thread verifies a frame's
payload and writes it into the attempt's blocks, under a lock that freeing them takes first
(open_blocks.py); it then notifies the engine thread. On a device one thread copies for all
connections (device_frames.py). Frames of an attempt that has ended are dropped. One object carries
out every action of its side, so that an attempt has one writer.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial

from pdserve.engine.api import Request, prefix_ids
from pdserve.engine.handoff.connection import DataLink, DataListeners
from pdserve.engine.handoff.device_frames import DeviceFrames, ReceivedFrame
from pdserve.engine.handoff.endpoint import HandoffEndpoint
from pdserve.engine.handoff.incoming import (
    ClaimQueue,
    IncomingHandoff,
    Promises,
    Received,
    ReceiveTimes,
    ReceivingEngine,
    promise_blocks,
)
from pdserve.engine.handoff.open_blocks import BlocksReleased
from pdserve.engine.handoff.protocol import (
    ID_BYTES,
    SECRET_BYTES,
    Action,
    Claimed,
    Domain,
    Filled,
    FrameError,
    FrameHeader,
    Handoff,
    HandoffCompatibility,
    HandoffEnded,
    Piece,
    Reserved,
    Side,
    Ticket,
    derive_keys,
    messages,
    verified_payload,
)
from pdserve.engine.handoff.recorder import EventLog, RecordKind
from pdserve.engine.kv import NO_MIXING, KvIdentity, Mixing, num_blocks, spec_digest
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.transport import KvTransport, Payload


class Receiver(HandoffEndpoint[IncomingHandoff]):
    """Runs every incoming hand-off attempt of a decode process.

    Calls these on the engine thread: `on_received(Received)` when all KV has arrived,
    `on_lost(attempt, reason)` when an attempt fails, and `on_verified(attempt, tokens cached so
    far, tokens that were cached before the attempt)` when verified blocks enter the prefix cache.
    """

    def __init__(
        self,
        engine: ReceivingEngine,
        kv: KvCache,
        *,
        incarnation: bytes,
        identity: KvIdentity,
        on_received: Callable[[Received], None],
        on_lost: Callable[[bytes, str], None],
        on_verified: Callable[[bytes, int, int], None] = lambda attempt, tokens, cached: None,
        wake: Callable[[], None],
        liveness: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        mixing: Mixing = NO_MIXING,
        encrypted: bool = False,
        event_log: EventLog | None = None,
    ) -> None:
        super().__init__(wake, liveness, clock, event_log)
        self.promises = Promises(kv.spec.block_size)
        self._engine = engine
        self._kv = kv
        self._incarnation = incarnation
        self.identity = identity
        self._compatibility = HandoffCompatibility(identity, kv.spec, mixing, encrypted)
        self._digest = spec_digest(kv.spec)
        self._on_received = on_received
        self._on_lost = on_lost
        self._on_verified = on_verified
        self._claims = ClaimQueue(
            engine, kv, self._clock, lambda a, reason: self._advance(a, HandoffEnded(reason))
        )
        self._device_frames = DeviceFrames(kv, self)
        self._to_ack: dict[IncomingHandoff, None] = {}  # in order of arrival
        self._listeners = DataListeners(
            incarnation, self._compatibility, self, self._links, self._count
        )
        self.refusals = self._listeners.refusals
        self.reserved_idle_block_s = 0.0  # of blocks between their reservation and their frame
        self.actions = {
            Action.QUEUE_CLAIM: self._claims.add,
            Action.GIVE_BACK_PROMISE: lambda a: self.promises.give_back(a.promised),
            Action.SEND_GRANTED: self._send_granted,
            Action.FREE_BLOCKS: self._free,
            Action.COMMIT: self._commit,
            Action.SEND_COMPLETE: lambda a: a.post(messages.Complete()),
            Action.SEND_ABORT: lambda a: a.post(messages.Abort(a.state.reason)),
            Action.SEND_GONE: self._send_gone,
            Action.REPORT_DONE: self._report_done,
            Action.REPORT_LOST: lambda a: self._on_lost(a.ticket.attempt, a.state.reason),
        }

    # from the service

    def start(self) -> None:
        super().start()
        self._device_frames.start()

    def listen(self, transports: Sequence[KvTransport], chosen: bool) -> dict[str, str]:
        """Open the listeners for prefill's connections (DataListeners.open); return transport name
        -> address."""
        return self._listeners.open(transports, chosen)

    def admit(
        self, attempt: bytes, request: Request, prefill_incarnation: bytes, deadline: float
    ) -> Ticket | None:
        """Promise blocks for a prompt whose KV the process `prefill_incarnation` will send, and
        return the attempt's ticket; None if decode has too few blocks. Takes constant time,
        whatever is queued."""
        choices = sum(c.finish is None for c in request.choices) or request.params.n
        tokens = len(prefix_ids(request))
        stats = self._engine.stats()
        blocks = promise_blocks(tokens, choices, self._kv.spec.block_size)
        blocks = min(blocks, stats.blocks.total)  # the engine rejects what can never fit
        available = stats.blocks.free + stats.blocks.cached + stats.parked_blocks
        if not self.promises.offer(blocks, available, stats.running):
            return None
        ticket = Ticket(
            os.urandom(ID_BYTES),
            os.urandom(SECRET_BYTES),
            attempt,
            prefill_incarnation,
            self._incarnation,
        )
        keys = derive_keys(ticket, self._digest, self.identity.digest)
        state, times = Handoff(Side.RECEIVE, deadline), ReceiveTimes(self._clock())
        self._add(IncomingHandoff(ticket, state, keys, request, blocks, times), blocks)
        return ticket

    def cancel_choices(self, attempt: bytes, choices: Sequence[int]) -> bool:
        """Cancel some choices of a request before it joins the batch; return False if its attempt
        is not live."""
        incoming = self.attempt(attempt)
        if incoming is None:
            return False
        incoming.cancelled.update(choices)
        return True

    def park(self, attempt: bytes, parked: bool) -> bool:
        """Set whether the request of an attempt joins the engine parked, that is, without
        generating; return False if the attempt is not live."""
        if (incoming := self.attempt(attempt)) is not None:
            incoming.parked = parked
        return incoming is not None

    def is_waiting(self, attempt: bytes) -> bool:
        """Return whether the attempt is live and has no reserved blocks yet."""
        incoming = self.attempt(attempt)
        return incoming is not None and not incoming.state.holds

    @property
    def promised_tokens(self) -> int:
        return self.promises.blocks * self._kv.spec.block_size

    def close(self) -> None:
        """End every attempt and connection. Called on the engine thread, or after that thread has
        ended."""
        self._device_frames.close()  # first, since it reads the windows
        self._listeners.close()
        for incoming in self.live:
            self._advance(incoming, HandoffEnded("decode stops"))
        self._close_links("decode stops")
        self._stop_ticker()

    # the engine thread

    def _work(self) -> bool:
        for granted in self._claims.granted():
            self._on_reserved(granted)
        for incoming in self._to_ack:
            self._safely(incoming, self._cache_verified)
            self._acknowledge(incoming)
        self._to_ack.clear()
        return False

    def _on_reserved(self, incoming: IncomingHandoff) -> None:
        assert incoming.bitmap is not None  # set by the grant, like the reservation
        assert incoming.reservation is not None
        blocks = num_blocks(incoming.reservation.blocks)
        self._note(incoming, RecordKind.TAKEN, blocks, incoming.bitmap.num_missing)
        self._advance(incoming, Reserved())
        self._commit_if_complete(incoming)

    def _claim(
        self, incoming: IncomingHandoff, link: DataLink, claim: messages.Claim, arrived_s: float
    ) -> None:
        if incoming.state.final or not link.open:
            self._send_gone(incoming, link)
            return
        if incoming.link is None:
            incoming.link = link
            assert link.hello is not None  # its Hello was accepted
            incoming.sender = self._compatibility.other_identity(link.hello)
            started = arrived_s - claim.age_ms / 1000
            incoming.times.claimed = max(incoming.times.admitted, started)
        self._advance(incoming, Claimed())
        if claim.num_tokens != incoming.num_tokens:
            reason = f"the Claim names {claim.num_tokens} tokens instead of {incoming.num_tokens}"
            self._advance(incoming, HandoffEnded(reason))

    def _send_granted(self, incoming: IncomingHandoff) -> None:
        assert incoming.reservation is not None
        incoming.post(messages.Granted(tuple(incoming.reservation.first_block)))

    def _send_gone(self, incoming: IncomingHandoff, link: DataLink | None = None) -> None:
        target = link or incoming.link
        if target is not None:
            self._note(incoming, RecordKind.GONE)
            target.post(messages.encode(messages.Gone(incoming.ticket.id)))

    def _accepted(self, frame: ReceivedFrame, written: Piece | None) -> None:
        incoming, header = frame.attempt, frame.header
        if not incoming.state.holds:  # it has ended in the meantime
            self._late(frame)
            return
        if incoming not in self._to_ack:  # once for all frames of a poll
            self._count_idle(incoming)
        cells = 0
        if written is not None and incoming.bitmap is not None:
            incoming.bitmap.add(written)
            cells = len(written.layers) * len(written.blocks)
            incoming.num_bytes += header.payload_bytes
            figures = self._figures(frame.link)
            figures.num_bytes += header.payload_bytes
            figures.frames += 1
        self._note(incoming, RecordKind.WRITTEN, header.sequence, cells)
        incoming.acks.append(header.sequence)
        self._to_ack[incoming] = None
        incoming.frame_done(header)
        self._commit_if_complete(incoming)

    def _acknowledge_duplicate(self, frame: ReceivedFrame) -> None:
        """Acknowledge a duplicate of a frame that is written already, like the frame itself."""
        if frame.attempt.state.holds:
            self._accepted(frame, None)

    def _count_damaged(self, frame: ReceivedFrame) -> None:
        self._count("corrupt_frames")
        self._figures(frame.link).refused += 1

    def _refused(self, frame: ReceivedFrame, error: FrameError) -> None:
        self._count("unfit_frames")
        self._figures(frame.link).refused += 1
        self._advance(frame.attempt, HandoffEnded(f"frame: {error}"))

    def _late(self, frame: ReceivedFrame) -> None:
        self._count("late_frames")
        frame.attempt.frame_done(frame.header)
        self._note(frame.attempt, RecordKind.LATE, frame.header.sequence)

    def _commit_if_complete(self, incoming: IncomingHandoff) -> None:
        if incoming.bitmap is not None and incoming.bitmap.complete and incoming.state.holds:
            incoming.acks.clear()  # Complete acknowledges all frames
            self._advance(incoming, Filled())

    def _cache_verified(self, incoming: IncomingHandoff) -> None:
        """Add the attempt's blocks that are verified in all layers to the prefix cache at once.
        They stay there if the attempt fails, so a retry begins after them."""
        if not incoming.state.holds:
            return
        tokens = incoming.newly_verified(self._kv.spec.block_size, self._clock())
        if tokens and incoming.reservation is not None:
            num_cached = self._engine.verified(incoming.reservation, tokens)
            if not incoming.sender:  # only that identity can use its KV
                num_cached_before = incoming.reservation.cached_tokens
                self._on_verified(incoming.ticket.attempt, num_cached, num_cached_before)

    def _check(self, attempt: IncomingHandoff) -> None:
        super()._check(attempt)
        slow = attempt.state.holds and attempt.is_slow(self._clock())
        if slow and not self._device_frames.busy:  # otherwise decode itself is slow
            self._advance(attempt, HandoffEnded("prefill slow"))

    def _acknowledge(self, incoming: IncomingHandoff) -> None:
        for start in range(0, len(incoming.acks), messages.MAX_SEQUENCES):
            incoming.post(
                messages.Ack(tuple(incoming.acks[start : start + messages.MAX_SEQUENCES]))
            )
        incoming.acks.clear()

    def _commit(self, incoming: IncomingHandoff) -> None:
        incoming.times.committed = self._clock()
        incoming.settle()
        self._engine.commit(incoming.reservation)
        self._note(incoming, RecordKind.HANDED)
        if incoming.parked:
            self._engine.park(incoming.request.key)

    def _count_idle(self, incoming: IncomingHandoff) -> None:
        self.reserved_idle_block_s += incoming.idle_block_s(self._clock())

    def _free(self, incoming: IncomingHandoff) -> None:
        self._count_idle(incoming)
        incoming.settle()
        self._engine.release(incoming.reservation)
        self._note(incoming, RecordKind.FREED)

    def _report_done(self, incoming: IncomingHandoff) -> None:
        assert incoming.reservation is not None
        assert incoming.link is not None
        cached = max(incoming.reservation.cached_tokens, incoming.prefill_cached)
        if incoming.sender:
            self._count("inexact")
        self._on_received(
            Received(
                incoming.ticket.attempt,
                incoming.link.transport,
                incoming.num_bytes,
                cached,
                incoming.times,
                incoming.num_tokens,
                inexact=bool(incoming.sender),
            )
        )
        if incoming.cancelled:
            self._engine.abort(incoming.request.key, sorted(incoming.cancelled))

    # threads of the connections

    def introduced(self, link: DataLink, hello: messages.Hello) -> str:
        return self._listeners.refusal(link, hello)

    def message(self, link: DataLink, message: messages.Message) -> None:
        if not isinstance(message, messages.Signed):
            raise FrameError(f"prefill sent an unexpected message: {type(message).__name__}")
        incoming = self._authenticated_attempt(message, link)
        if incoming is None:
            if isinstance(message.body, messages.Claim):
                link.post(messages.encode(messages.Gone(message.ticket)))
            return
        if incoming.ticket.prefill_incarnation != link.peer:
            raise FrameError("a message names a ticket of another prefill process")
        link.trust()
        if isinstance(message.body, messages.Claim):
            claim = partial(self._claim, incoming, link, message.body, self._clock())
            self._post(claim)
        elif not self._handle_shared(incoming, message):
            if not isinstance(message.body, messages.Computed):
                raise FrameError(
                    f"prefill sent an unexpected message: {type(message.body).__name__}"
                )
            incoming.prefill_cached = message.body.cached_tokens
            incoming.times.computed = incoming.times.computed or self._clock()

    def frame(self, link: DataLink, header: FrameHeader, covered: bytes, tag: bytes) -> bool:
        incoming = self._live.get(header.ticket)
        if incoming is None or incoming.link is not link:
            if signer := self._signer(link, Domain.HEADER, header.sequence, covered, tag):
                signer.post(messages.Nack(header.sequence))
            self._count("late_frames" if signer is None else "refused")
            return False
        if not incoming.peer_key.matches(Domain.HEADER, header.sequence, covered, tag):
            self._count("refused")
            raise FrameError("a frame header has a wrong tag")
        if incoming.arrives(header):
            return True
        self._count("duplicate_frames")
        if incoming.has(header):  # acknowledge a written frame like its first copy
            self._on_engine_thread(
                ReceivedFrame(incoming, link, header), self._acknowledge_duplicate
            )
        return False

    def payload(self, link: DataLink, header: FrameHeader, payload: Payload) -> None:
        incoming = self._live.get(header.ticket)
        if incoming is None:
            self._count("late_frames")
            if link.direct:
                link.credit(header)
            return
        if not isinstance(payload, memoryview):
            frame = ReceivedFrame(incoming, link, header, payload)
            self._device_frames.arrived(frame)  # the copy verifies it
            return
        frame = ReceivedFrame(incoming, link, header)
        tag, sealed = header.payload_tag, self._compatibility.encrypted
        verified = verified_payload(incoming.peer_key, header.sequence, payload, tag, sealed)
        if verified is None:
            self.damaged(frame)
            return
        num_before = incoming.num_written
        try:
            piece = incoming.write(self._kv, header, verified)
        except BlocksReleased:
            self.late(frame)
        except FrameError as err:
            self.refused(frame, err)
        except Exception as err:
            self.failed(frame, err)
        else:  # wake the engine thread only for a whole chunk
            self.accepted(frame, piece, piece is None or incoming.num_written > num_before)

    # FrameVerdicts

    def accepted(self, frame: ReceivedFrame, written: Piece | None, wake: bool = True) -> None:
        self._on_engine_thread(frame, partial(self._accepted, written=written), wake)

    def damaged(self, frame: ReceivedFrame) -> None:
        _request_resend(frame)
        self._on_engine_thread(frame, self._count_damaged)

    def refused(self, frame: ReceivedFrame, error: FrameError) -> None:
        self._on_engine_thread(frame, partial(self._refused, error=error))

    def late(self, frame: ReceivedFrame) -> None:
        self._on_engine_thread(frame, self._late)

    def failed(self, frame: ReceivedFrame, error: Exception) -> None:
        self._on_engine_thread(frame, partial(_fail, error=error))

    def _on_engine_thread(
        self, frame: ReceivedFrame, handler: Callable[[ReceivedFrame], None], wake: bool = True
    ) -> None:
        """Queue `handler(frame)` for the engine thread. If it raises, only the frame's attempt
        ends."""
        self._post(partial(self._safely, frame.attempt, lambda _: handler(frame)), wake)


def _request_resend(frame: ReceivedFrame) -> None:
    """Request a damaged frame again from prefill, by Nack; any thread may call it."""
    frame.attempt.frame_done(frame.header)
    frame.attempt.post(messages.Nack(frame.header.sequence))


def _fail(frame: ReceivedFrame, error: Exception) -> None:
    """Raise a frame's error on the engine thread, where it ends only the frame's attempt."""
    raise error
