"""The common part of Sender and Receiver: live attempts, an inbox, Progress messages, the clock.

The engine thread owns every attempt and runs the machine. Threads of a connection post to the
inbox; the ticker thread only signs Progress and wakes the engine thread. A record that names a
ticket which is not live here is counted and ignored, unless its tag shows that the ticket's id was
damaged on the way.
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
    """Counters of one transport since the start, of KV payloads only."""

    num_bytes: int = 0
    frames: int = 0
    seconds: float = 0.0
    refused: int = 0


class HandoffAttempt:
    """The state of one attempt on this side."""

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
        """Sign a message and send it; any thread may call it."""
        if self.link is not None:
            sequence = next(self.sequence)
            self.link.post(messages.sign(body, self.ticket.id, sequence, self.own_key))


AttemptT = TypeVar("AttemptT", bound=HandoffAttempt)


class HandoffEndpoint(Generic[AttemptT]):
    """Runs the attempts of one side. `wake` makes the engine thread call `poll`; `liveness` returns
    that thread's liveness counter.

    A subclass maps every action that the machine gives its side to a method.
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
        """The connections whose threads have not ended."""
        return list(self._links)

    def attempt(self, attempt: bytes) -> AttemptT | None:
        """The live attempt with this id."""
        return self._by_attempt.get(attempt)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def _count(self, name: str) -> None:
        """Add one to a counter; any thread may call it."""
        with self._counters_lock:
            self.counters[name] += 1

    # the engine thread

    def poll(self) -> bool:
        """Handle everything that has arrived; return True if there is more to do at once."""
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
        """Do the subclass's part of a poll; return True if there is more to do at once."""
        return False

    def cancel(self, attempt: bytes, reason: str) -> bool:
        """End an attempt here and at the peer; return False if it is not live."""
        live_attempt = self.attempt(attempt)
        if live_attempt is None:
            return False
        self._advance(live_attempt, HandoffEnded(reason))
        return True

    def _add(self, attempt: AttemptT, promised: int = 0) -> None:
        """Register a new attempt with `promised` promised blocks."""
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
        """Take one step of the machine and carry its actions out.

        An attempt that has ended is forgotten first, so a report never finds it. If an action
        raises, the others are still carried out, so blocks and promise are always released. A
        commit that raises did not happen.
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
        """Call `act`; if it raises, return False and end only this attempt, in the next poll: the
        engine may be between a step's plan and its end."""
        try:
            act(attempt)
        except Exception:
            log.exception("a hand-off failed: attempt %s", attempt.ticket.attempt.hex()[:8])
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
        """End every attempt on a closed connection."""
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
        """Add to the inbox; without `wake`, the action waits for the next poll, at most one tick.
        Raises FrameError if the inbox is full."""
        if len(self._inbox) >= MAX_INBOX:
            raise FrameError("the inbox of the engine thread is full")
        self._inbox.append(action)
        if wake:
            self._wake()

    def _authenticated_attempt(self, message: messages.Signed, link: DataLink) -> AttemptT | None:
        """Return the live attempt of a message; None: ignore it. Raises FrameError."""
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
            raise FrameError("the message is about an attempt of another connection")
        if not message.genuine(attempt.peer_key):
            self._count("refused")
            raise FrameError("a control message has a wrong tag")
        return attempt

    def _signer(
        self, link: DataLink, domain: Domain, sequence: int, covered: bytes, tag: bytes
    ) -> AttemptT | None:
        """Return the live attempt whose peer signed a record that names no live ticket.

        Usually there is none, since the attempt has ended. But if the ticket's id was damaged on
        the way, the tag matches under the id of an attempt of this connection, whose peer waits for
        an answer.
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
        """Handle a message that both sides may receive; return False for any other message."""
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
        """DataLinkHandler: drop the attempts of a connection that has closed."""
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
        """Return whether the engine's step has only rows of other requests."""
        return False

    def _stop_ticker(self) -> None:
        self._stop.set()
        if self._ticker.is_alive():
            self._ticker.join()
