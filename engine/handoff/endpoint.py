"""The common part of Sender and Receiver: live attempts, the engine thread's inbox, Progress
messages, and timeouts.

The engine thread owns every attempt and runs the state machine. Threads of connections post to the
inbox; the ticker thread only signs Progress messages and wakes the engine thread. A record that
names the ticket of no live attempt is counted and ignored, unless its tag shows that the ticket's
id was damaged on the way.
"""

import itertools
import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from pdserve.engine.handoff.connection import DataLink
from pdserve.engine.handoff.protocol import (
    PROGRESS_S,
    Action,
    Domain,
    Event,
    FrameError,
    Handoff,
    HandoffEnded,
    Heard,
    PeerProgress,
    TagKey,
    Tick,
    Ticket,
    messages,
    renamed,
    step,
)
from pdserve.engine.handoff.recorder import MAX_ARGUMENT, EventLog, RecordKind

log = logging.getLogger(__name__)

INTERNAL = "internal error"  # reason of an attempt's end if one of its actions raises
MAX_INBOX = 1 << 16  # messages that the engine thread has not seen


@dataclass(slots=True)
class TransportFigures:
    """Counters of one transport since the process began; they count only KV payloads."""

    num_bytes: int = 0
    frames: int = 0
    seconds: float = 0.0
    refused: int = 0


class HandoffAttempt:
    """The state of one hand-off attempt in this process: its ticket, phase, connection and keys."""

    def __init__(self, ticket: Ticket, state: Handoff, own_key: TagKey, peer_key: TagKey) -> None:
        self.ticket = ticket
        self.state = state
        self.link: DataLink | None = None
        self.peer_key = peer_key
        self.progress: PeerProgress | None = None  # the newest; the reader thread sets it
        self.passed_over = False  # the peer computes other requests only; the reader thread sets it
        self.own_key = own_key
        self.sequence = itertools.count(1)  # of every record that this side signs

    def post(self, body: messages.Body) -> None:
        """Sign a control message about this attempt and send it; any thread may call it."""
        if self.link is not None:
            sequence = next(self.sequence)
            self.link.post(messages.sign(body, self.ticket.id, sequence, self.own_key))


AttemptT = TypeVar("AttemptT", bound=HandoffAttempt)


class HandoffEndpoint(Generic[AttemptT]):
    """Runs the hand-off attempts of one side, prefill or decode. `wake` makes the engine thread
    call `poll`; `liveness` returns the counter by which the peer sees that the engine thread is
    alive.

    A subclass maps each action of the state machine that its side needs to a method (`actions`).
    """

    actions: dict[Action, Callable[[AttemptT], None]]

    def __init__(
        self,
        wake: Callable[[], None],
        liveness: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        event_log: EventLog | None = None,
    ) -> None:
        self.counters: Counter[str] = Counter()  # "stale", "refused", ...; `_count` adds to it
        self._counters_lock = threading.Lock()
        self.figures = defaultdict[str, TransportFigures](TransportFigures)  # by transport
        self._wake = wake
        self._liveness = liveness
        self._clock = clock
        self._event_log = event_log or EventLog()
        self._live: dict[bytes, AttemptT] = {}  # by ticket id
        self._by_attempt: dict[bytes, AttemptT] = {}
        self._links: dict[DataLink, None] = {}  # until their threads have ended
        self._inbox: deque[Callable[[], object]] = deque()
        self._next_tick = 0.0
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._tick_loop, name="kv-progress")

    def start(self) -> None:
        self._ticker.start()

    @property
    def live(self) -> list[AttemptT]:
        """The attempts that have not ended, oldest first."""
        return list(self._live.values())

    @property
    def links(self) -> list[DataLink]:
        """The data connections whose threads have not ended."""
        return list(self._links)

    def attempt(self, attempt: bytes) -> AttemptT | None:
        """Return the live attempt with this id; None if there is none."""
        return self._by_attempt.get(attempt)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def _count(self, name: str) -> None:
        """Add one to the counter `name`; any thread may call it."""
        with self._counters_lock:
            self.counters[name] += 1

    # the engine thread

    def poll(self) -> bool:
        """Handle everything in the inbox and check all timeouts; return True if more work is ready
        at once."""
        while self._inbox:
            self._inbox.popleft()()
        more = self._work()
        now = self._clock()
        if now >= self._next_tick:
            self._next_tick = now + PROGRESS_S
            for attempt in self.live:
                self._check(attempt)
            for link in self.links:
                self._figures(link)  # also counts the seconds of the link's last frame
                if link.ended:
                    del self._links[link]
        return more

    def _work(self) -> bool:
        """Do the work that a subclass adds to each poll; return True if more is ready at once."""
        return False

    def cancel(self, attempt: bytes, reason: str) -> bool:
        """End an attempt in this process and at the peer; return False if the attempt is not
        live."""
        live_attempt = self.attempt(attempt)
        if live_attempt is None:
            return False
        self._advance(live_attempt, HandoffEnded(reason))
        return True

    def _add(self, attempt: AttemptT, promised: int = 0) -> None:
        """Register a new attempt, for which `promised` blocks are promised (0 at prefill)."""
        self._live[attempt.ticket.id] = attempt
        self._by_attempt[attempt.ticket.attempt] = attempt
        remaining_s = max(0.0, attempt.state.deadline - self._clock())
        remaining_ms = int(min(remaining_s * 1000, MAX_ARGUMENT))
        self._note(attempt, RecordKind.OPENED, promised, remaining_ms)

    def _note(
        self, attempt: HandoffAttempt, kind: RecordKind, detail: int = 0, argument: int = 0
    ) -> None:
        self._event_log.record(kind, attempt.ticket.attempt, attempt.state, detail, argument)

    def _advance(self, attempt: AttemptT, event: Event) -> None:
        """Take one step of an attempt's state machine and carry out the step's actions.

        An attempt that the step ends is forgotten before its actions run, so a report never finds
        it. If an action raises, the other actions still run, so that the blocks and the promise are
        always released. If COMMIT raises, the step is undone and the attempt ends.
        """
        old_state = attempt.state
        attempt.state, actions = step(old_state, event, self._clock())
        self._event_log.step(attempt.ticket.attempt, event, old_state, attempt.state, actions)
        if attempt.state.final:
            self._live.pop(attempt.ticket.id, None)
            self._by_attempt.pop(attempt.ticket.attempt, None)
        for action in actions:
            if action is Action.COUNT_STALE:
                self._count("stale")
            elif not self._safely(attempt, self.actions[action]) and action is Action.COMMIT:
                attempt.state = old_state
                self._note(attempt, RecordKind.UNDONE)
                self._advance(attempt, HandoffEnded(INTERNAL))
                return

    def _safely(self, attempt: AttemptT, act: Callable[[AttemptT], None]) -> bool:
        """Call `act(attempt)`. If it raises, log the error, return False, and end only this
        attempt, in the next poll: the engine may be in the middle of a step now."""
        try:
            act(attempt)
        except Exception:
            log.exception(
                "hand-off attempt %s failed with an unexpected error",
                attempt.ticket.attempt.hex()[:8],
            )
            if not attempt.state.final:
                self._inbox.append(partial(self._advance, attempt, HandoffEnded(INTERNAL)))
                self._wake()
            return False
        return True

    def _check(self, attempt: AttemptT) -> None:
        link = attempt.link
        if attempt.state.linked:  # without a link it is being dialled, with a separate limit
            self._advance(attempt, Heard(link.heard if link is not None else self._clock()))
        if attempt.progress is not None:
            self._advance(attempt, attempt.progress)
        self._advance(attempt, Tick())
        if link is not None and attempt.state.reason in ("peer silent", "peer frozen"):
            link.end(attempt.state.reason)  # the peer may still write into its window

    def _drop_link(self, link: DataLink, reason: str) -> None:
        """End every attempt that uses a connection which has closed."""
        for attempt in [a for a in self.live if a.link is link]:
            self._advance(attempt, HandoffEnded(f"connection: {reason}", peer_notified=True))

    def _figures(self, link: DataLink) -> TransportFigures:
        figures = self.figures[link.transport]
        figures.seconds += link.take_busy_s()
        return figures

    def _close_links(self, reason: str) -> None:
        for link in self.links:
            link.close(reason)
        self._links.clear()

    # threads of the connections

    def _post(self, action: Callable[[], object], wake: bool = True) -> None:
        """Add an action to the engine thread's inbox. Without `wake` it waits for the next poll, at
        most one tick. Raises FrameError if the inbox is full."""
        if len(self._inbox) >= MAX_INBOX:
            raise FrameError(f"the engine thread's inbox is full: {MAX_INBOX} messages")
        self._inbox.append(action)
        if wake:
            self._wake()

    def _authenticated_attempt(self, message: messages.Signed, link: DataLink) -> AttemptT | None:
        """Return the live attempt that a signed message is about; None if the message must be
        ignored. Raises FrameError if the tag is wrong or the attempt uses another connection."""
        attempt = self._live.get(message.ticket)
        if attempt is None:
            if isinstance(message.body, messages.Progress):  # some arrive after every end
                return None
            domain, covered = Domain.CONTROL, message.covered
            attempt = self._signer(link, domain, message.sequence, covered, message.tag)
            if attempt is None:
                self._count("stale")
            return attempt
        if attempt.link is not None and attempt.link is not link:
            raise FrameError("a message names an attempt of another connection")
        if not message.genuine(attempt.peer_key):
            self._count("refused")
            raise FrameError("a control message has a wrong tag")
        return attempt

    def _signer(
        self, link: DataLink, domain: Domain, sequence: int, covered: bytes, tag: bytes
    ) -> AttemptT | None:
        """Return the live attempt whose peer signed a record that names no live ticket; None if no
        peer did.

        Usually the record's attempt has ended, and the result is None. But if the ticket's id was
        damaged on the way, the record's tag matches under the id of a live attempt of this
        connection, whose peer waits for an answer.
        """
        if not link.genuine:
            return None
        for attempt in self.live:
            if attempt.link is None or attempt.link is link:  # a Claim precedes its link
                genuine = renamed(covered, attempt.ticket.id)
                if attempt.peer_key.matches(domain, sequence, genuine, tag):
                    self._count("misnamed")
                    return attempt
        return None

    def _handle_shared(self, attempt: AttemptT, message: messages.Signed) -> bool:
        """Handle a message that both sides may receive (Progress, Abort); return False for any
        other message."""
        match message.body:
            case messages.Progress(liveness, passed_over):
                attempt.passed_over = passed_over
                attempt.progress = PeerProgress(self._clock(), liveness)
            case messages.Abort(reason):
                end = HandoffEnded(f"peer: {reason}", peer_notified=True)
                self._post(partial(self._advance, attempt, end))
            case _:
                return False
        return True

    def closed(self, link: DataLink, reason: str) -> None:
        """Implement DataLinkHandler.closed: end the attempts that use the closed connection."""
        self._inbox.append(partial(self._drop_link, link, reason))
        self._wake()

    # the ticker thread

    def _tick_loop(self) -> None:
        while not self._stop.wait(PROGRESS_S):
            self._beat()

    def _beat(self) -> None:
        live = self.live
        liveness = self._liveness()
        for attempt in live:
            if attempt.state.linked:
                attempt.post(messages.Progress(liveness, self._passes_over(attempt)))
        if live:
            self._wake()

    def _passes_over(self, attempt: AttemptT) -> bool:
        """Return whether the engine's present step computes other requests and not this
        attempt's."""
        return False

    def _stop_ticker(self) -> None:
        self._stop.set()
        if self._ticker.is_alive():
            self._ticker.join()
