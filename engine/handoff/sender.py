"""Prefill's side of a hand-off: claims blocks at decode when the engine has scheduled the prompt,
and sends the blocks that are computed. In a migration of a running request it is the side of the
source worker, where all blocks are computed from the start.

Everything runs on the engine thread except the DataLink callbacks, dialling with its first Claims,
and the building of frames (outgoing.py). Blocks are held from Picked until decode's Complete or the
attempt's end. A prefill_only request is never preempted (scheduling/job_table.py), so the bytes of
a block do not change between its first frame and a resend. One object carries out every action of
its side, so that an attempt has one writer.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from pdserve.engine.api import (
    Event,
    PrefillComputed,
    Request,
    RequestFailed,
    SamplingParams,
    Scheduled,
    Step,
)
from pdserve.engine.handoff.connection import DataLink, Dialer
from pdserve.engine.handoff.endpoint import HandoffEndpoint
from pdserve.engine.handoff.outgoing import (
    HANDED_BACK,
    OutgoingHandoff,
    SendTimes,
    Sent,
)
from pdserve.engine.handoff.protocol import (
    Action,
    ClaimGranted,
    Filled,
    FrameError,
    FrameHeader,
    Handoff,
    HandoffEnded,
    Heard,
    Phase,
    Picked,
    Side,
    Ticket,
    cut,
    derive_keys,
    messages,
)
from pdserve.engine.handoff.recorder import EventLog, RecordKind
from pdserve.engine.kv import KvIdentity, encode_spec, num_blocks, spec_digest
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.transport import KvTransport, Payload, Target, TransportRefused

log = logging.getLogger(__name__)

MAX_RESENDS = 2
MAX_AGE_MS = (1 << 32) - 1
DIALERS = 4


class SendingEngine(Protocol):
    """The methods of the engine that a Sender uses."""

    def submit(self, request: Request) -> None: ...
    def abort(self, key: str, choices: Sequence[int] = ()) -> bool: ...
    def held_blocks(self, key: str) -> list[list[int]]: ...
    def release_held(self, key: str) -> None: ...


@dataclass(slots=True)
class _DecodePeer:
    """A decode process that a Sender knows: the connection to it, or the attempts that wait for
    one."""

    link: DataLink | None = None
    waiting: list[OutgoingHandoff] = field(default_factory=list)


class PromptToSend(NamedTuple):
    """A prompt whose KV prefill computes and sends; `ids` lack the prompt's last token, which
    decode computes."""

    ids: tuple[int, ...]
    cache_salt: bytes = b""
    tenant: bytes = b""
    priority: int = 0


class Sender(HandoffEndpoint[OutgoingHandoff]):
    """Runs every outgoing hand-off attempt of a process. Calls `on_ended(Sent)` on the engine
    thread, once per attempt. `passes_over(key)` returns whether the engine computes only requests
    other than `key`."""

    def __init__(
        self,
        engine: SendingEngine,
        kv: KvCache,
        transports: Sequence[KvTransport],
        *,
        incarnation: bytes,
        identity: KvIdentity,
        on_ended: Callable[[Sent], None],
        wake: Callable[[], None],
        liveness: Callable[[], int],
        passes_over: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
        encrypted: bool = False,
        event_log: EventLog | None = None,
    ) -> None:
        super().__init__(wake, liveness, clock, event_log)
        self._engine = engine
        self._engine_passes_over = passes_over
        self._kv = kv
        self._incarnation = incarnation
        self._identity = identity
        self._encrypted = encrypted
        self._spec = encode_spec(kv.spec)
        self._digest = spec_digest(kv.spec)
        self._on_ended = on_ended
        self._transports = transports
        self._dialer = Dialer(transports, self)
        self._dial_threads = ThreadPoolExecutor(DIALERS, "kv-dial")
        self._peers: dict[bytes, _DecodePeer] = {}  # by decode incarnation
        self._by_key: dict[str, OutgoingHandoff] = {}
        self.actions = {
            Action.SEND_CLAIM: self._send_claim,
            Action.SEND_FRAMES: self._push_computed,
            Action.SEND_ABORT: lambda a: a.post(messages.Abort(a.state.reason)),
            Action.LEAVE_QUEUE: self._leave,
            Action.FREE_BLOCKS: self._free,
            Action.REPORT_DONE: self._report,
            Action.REPORT_LOST: self._report,
        }

    # from the service

    @property
    def refusals(self) -> Counter[str]:
        """Number of failed connection tries, by transport."""
        return self._dialer.refusals

    def start_sending(
        self,
        ticket: Ticket,
        address: str,
        prompt: PromptToSend,
        deadline: float,
        receiver: bytes = b"",
    ) -> None:
        """Queue a prompt for prefill; its KV is sent to decode as it is computed. `receiver`:
        digest of decode's KV identity; empty if it equals the local one. Raises what the engine's
        `submit` raises."""
        key = ticket.attempt.hex()
        self._engine.submit(
            Request(
                key,
                prompt.ids,
                SamplingParams(max_tokens=1),
                seed=0,
                cache_salt=prompt.cache_salt,
                tenant=prompt.tenant,
                priority=prompt.priority,
                prefill_only=True,
            )
        )
        self._by_key[key] = self._open(ticket, address, len(prompt.ids), deadline, receiver, "")

    def send_held(
        self,
        ticket: Ticket,
        address: str,
        key: str,
        num_tokens: int,
        deadline: float,
        receiver: bytes = b"",
    ) -> None:
        """Send the KV of the first `num_tokens` tokens of a request whose blocks the engine holds.
        If decode gets all of them, the blocks are freed; otherwise the request keeps them. Raises
        KeyError if the engine holds no such request."""
        blocks = num_blocks(self._engine.held_blocks(key))
        outgoing = self._open(ticket, address, num_tokens, deadline, receiver, key)
        outgoing.cached_tokens = outgoing.num_computed = num_tokens
        outgoing.times.picked = outgoing.times.computed = self._clock()
        outgoing.done = True
        self._note(outgoing, RecordKind.TAKEN, blocks)
        self._advance(outgoing, Picked())

    def hand_back(self) -> None:
        """End the attempts whose prefill has not begun, so that other workers can serve them."""
        for outgoing in self.live:
            if outgoing.state.phase is Phase.ADMITTED:
                self._advance(outgoing, HandoffEnded(HANDED_BACK))

    def on_step(self, step: Step) -> None:
        """Process the events of an engine step: send blocks that are now computed; called on the
        engine thread."""
        for event in step.events:
            outgoing = self._by_key.get(event.key)
            if outgoing is not None:
                self._safely(outgoing, partial(self._on_event, event))

    def close(self) -> None:
        """End every attempt and connection. Called on the engine thread, or after that thread has
        ended."""
        for outgoing in self.live:
            self._advance(outgoing, HandoffEnded("prefill stops"))
        self._dial_threads.shutdown()
        for transport in self._transports:
            transport.close()
        while self._inbox:
            self._inbox.popleft()()  # may add a connection that was just opened
        self._close_links("prefill stops")
        self._stop_ticker()

    # the ticker thread

    def _passes_over(self, attempt: OutgoingHandoff) -> bool:
        return not attempt.done and self._engine_passes_over(attempt.key)

    # the engine thread

    def _open(
        self,
        ticket: Ticket,
        address: str,
        num_tokens: int,
        deadline: float,
        receiver: bytes,
        held_key: str,
    ) -> OutgoingHandoff:
        keys = derive_keys(ticket, self._digest, receiver or self._identity.digest)
        state, times = Handoff(Side.SEND, deadline), SendTimes(self._clock())
        encrypted = self._encrypted
        outgoing = OutgoingHandoff(
            ticket, state, keys, address, num_tokens, times, self._event_log, encrypted, held_key
        )
        self._add(outgoing)
        return outgoing

    def _on_event(self, event: Event, outgoing: OutgoingHandoff) -> None:
        match event:
            case Scheduled(_, cached_tokens):
                outgoing.cached_tokens = cached_tokens
                outgoing.times.picked = self._clock()
                blocks = num_blocks(self._engine.held_blocks(outgoing.key))
                self._note(outgoing, RecordKind.TAKEN, blocks)
                self._advance(outgoing, Picked())
            case PrefillComputed(_, num_tokens, done):
                self._computed(outgoing, num_tokens, done)
            case RequestFailed():
                outgoing.settle()  # the engine has freed the blocks
                self._advance(outgoing, HandoffEnded("the engine failed the request"))

    def _computed(self, outgoing: OutgoingHandoff, num_tokens: int, done: bool) -> None:
        outgoing.num_computed = num_tokens
        outgoing.done = done
        if done:
            outgoing.times.computed = self._clock()
            outgoing.post(messages.Computed(outgoing.cached_tokens))
        self._push_computed(outgoing)

    def _push_computed(self, outgoing: OutgoingHandoff) -> None:
        """Queue frames for the attempt's blocks that are computed, requested by decode, and not
        sent yet."""
        if not outgoing.next_blocks or not outgoing.state.holds or outgoing.link is None:
            return
        size = self._kv.spec.block_size
        full = outgoing.num_computed // size
        ready = -(-outgoing.num_tokens // size) if outgoing.done else full
        if all(start >= ready for start in outgoing.next_blocks):
            return
        tables = self._engine.held_blocks(outgoing.key)
        max_bytes = outgoing.link.slot_bytes
        for group, start in enumerate(outgoing.next_blocks):
            if start < ready:
                outgoing.next_blocks[group] = ready
                pieces = cut(self._kv.spec, group, range(start, ready), max_bytes)
                outgoing.push(self._kv, pieces, tables[group], 0)

    def _send_claim(self, outgoing: OutgoingHandoff) -> None:
        peer = self._peers.setdefault(outgoing.ticket.decode_incarnation, _DecodePeer())
        if peer.link is not None and peer.link.open:
            self._claim_on(outgoing, peer.link)
            self._claimed(outgoing)
            return
        peer.link = None
        peer.waiting.append(outgoing)
        if len(peer.waiting) == 1:
            target = Target(outgoing.address, outgoing.ticket.decode_incarnation)
            self._dial_threads.submit(self._dial, target, peer)

    def _claimed(self, outgoing: OutgoingHandoff) -> None:
        self._advance(outgoing, Heard(self._clock()))
        if outgoing.done:
            outgoing.post(messages.Computed(outgoing.cached_tokens))

    def _dialed(self, incarnation: bytes, link: DataLink | None, reason: str) -> None:
        peer = self._peers[incarnation]
        peer.link = link
        if link is not None:
            self._links[link] = None
        waiting, peer.waiting = peer.waiting, []
        for outgoing in waiting:
            if outgoing.state.final:  # it ended during the dial, and decode does not know
                outgoing.link = link
                outgoing.post(messages.Abort(outgoing.state.reason))
            elif link is not None and link.open:
                if outgoing.link is None:  # it joined after the others had been claimed
                    self._claim_on(outgoing, link)
                self._claimed(outgoing)
            else:
                end = HandoffEnded(
                    reason or "the connection closed immediately", peer_notified=True
                )
                self._advance(outgoing, end)

    def _granted(self, outgoing: OutgoingHandoff, first_blocks: tuple[int, ...]) -> None:
        if len(first_blocks) != len(self._kv.spec.groups):
            self._advance(outgoing, HandoffEnded("decode granted blocks of another KV layout"))
            return
        if not outgoing.next_blocks:
            outgoing.next_blocks = list(first_blocks)
        self._advance(outgoing, ClaimGranted())

    def _acknowledged(self, outgoing: OutgoingHandoff, sequences: tuple[int, ...]) -> None:
        for sequence in sequences:
            if outgoing.answered(sequence) is None:
                self._count("stale")

    def _refused(self, outgoing: OutgoingHandoff, sequence: int) -> None:
        """Resend a frame whose payload did not verify at decode. After MAX_RESENDS resends, end the
        attempt."""
        pushed = outgoing.answered(sequence)
        if pushed is None or not outgoing.state.holds or outgoing.link is None:
            self._count("stale")
            return
        piece, resends = pushed.piece, pushed.resends + 1
        if resends > MAX_RESENDS:
            self._advance(outgoing, HandoffEnded(f"decode refused a frame {resends} times"))
            return
        self._count("resent")
        table = self._engine.held_blocks(outgoing.key)[piece.group]
        outgoing.push(self._kv, [piece], table, resends)

    def _completed(self, outgoing: OutgoingHandoff) -> None:
        self._advance(outgoing, Filled())
        outgoing.answered_all()

    def _leave(self, outgoing: OutgoingHandoff) -> None:
        """Free the attempt's blocks or its place in the engine's queue, once no frame reads the
        blocks. A request that migrates keeps its blocks unless decode has all of them."""
        readable = outgoing.readable  # only this thread changes it
        outgoing.settle()
        if outgoing.migrates and outgoing.state.phase is not Phase.COMMITTED:
            return  # the held request keeps them
        if readable and outgoing.done:
            self._engine.release_held(outgoing.key)
        elif readable:
            self._engine.abort(outgoing.key)

    def _free(self, outgoing: OutgoingHandoff) -> None:
        self._leave(outgoing)
        self._note(outgoing, RecordKind.FREED)

    def _report(self, outgoing: OutgoingHandoff) -> None:
        self._by_key.pop(outgoing.key, None)
        outgoing.times.ended = self._clock()
        transport = ""
        if outgoing.link is not None:
            transport = outgoing.link.transport
            figures = self._figures(outgoing.link)
            figures.num_bytes += outgoing.num_bytes
            figures.frames += outgoing.num_frames
        self._on_ended(
            Sent(
                outgoing.ticket.attempt,
                outgoing.state.reason,
                outgoing.cached_tokens,
                outgoing.num_bytes,
                transport,
                outgoing.times,
            )
        )

    # other threads

    def _claim_on(self, outgoing: OutgoingHandoff, link: DataLink) -> None:
        outgoing.link = link
        age_s = self._clock() - outgoing.times.picked
        outgoing.post(messages.Claim(outgoing.num_tokens, min(MAX_AGE_MS, int(age_s * 1000))))

    def _dial(self, target: Target, peer: _DecodePeer) -> None:
        """Connect to a decode process and claim blocks at once for the attempts that wait for it;
        runs on a dialling thread, since the engine thread may be computing a chunk."""
        hello = messages.Hello(
            self._incarnation, target.incarnation, self._identity, "", self._spec, self._encrypted
        )
        link, reason = None, ""
        try:
            link = self._dialer.dial(target, hello)
            for outgoing in list(peer.waiting):
                if not outgoing.state.final:
                    self._claim_on(outgoing, link)
        except TransportRefused as err:
            reason = f"cannot reach decode: {err}"
        except Exception:
            log.exception("connecting to a decode worker failed with an unexpected error")
            reason = "internal error"
        self._inbox.append(partial(self._dialed, target.incarnation, link, reason))
        self._wake()

    def introduced(self, link: DataLink, hello: messages.Hello) -> str:
        return "prefill accepts no connections"

    def frame(self, link: DataLink, header: FrameHeader, covered: bytes, tag: bytes) -> bool:
        raise FrameError("decode sent a frame, but only prefill sends frames")

    def payload(self, link: DataLink, header: FrameHeader, payload: Payload) -> None:
        raise FrameError("decode sent a frame, but only prefill sends frames")

    def message(self, link: DataLink, message: messages.Message) -> None:
        if isinstance(message, messages.Gone):
            gone = self._live.get(message.ticket)
            if gone is not None and gone.link is link:
                end = HandoffEnded("decode does not know the attempt", peer_notified=True)
                self._post(partial(self._advance, gone, end))
            return
        if not isinstance(message, messages.Signed):
            raise FrameError(f"decode sent an unexpected message: {type(message).__name__}")
        outgoing = self._authenticated_attempt(message, link)
        if outgoing is None or self._handle_shared(outgoing, message):
            return
        match message.body:
            case messages.Granted(first_blocks):
                self._post(partial(self._granted, outgoing, first_blocks))
            case messages.Ack(sequences):
                self._post(partial(self._acknowledged, outgoing, sequences))
            case messages.Nack(sequence):
                self._post(partial(self._refused, outgoing, sequence))
            case messages.Complete():
                outgoing.times.completed = self._clock()
                self._post(partial(self._completed, outgoing))
            case _:
                raise FrameError(
                    f"decode sent an unexpected message: {type(message.body).__name__}"
                )
