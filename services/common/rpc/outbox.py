"""Queues of events for a peer that may read slowly, and a compact encoding of new tokens as rows.
Adding an event never blocks.

Used on the event loop's thread only. Events keep their order, except that a Tokens event may be
merged into an unsent Tokens event of the same choice that it continues, and so overtake events of
other choices.

One event can hold token rows of any number of requests, as three columns: number, position, id. The
number refers to a choice (one of a request's responses), and is assigned with the choice's first
row in a session.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Generic, NamedTuple, TypeVar

from google.protobuf.message import Message

from pdserve.protos import common_pb2 as pb
from pdserve.protos.common_pb2 import TokenRows
from pdserve.protos.router_pb2 import RequestEvent
from pdserve.protos.worker_pb2 import DecodeEvent

MAX_BATCH_BYTES = 192 << 10  # of the events in one message; a larger event travels alone
MAX_MERGED_IDS = 1024
MAX_MERGED_LOGPROBS = 256  # a candidate has about 10 bytes, a token up to 20 candidates

EventT = TypeVar("EventT", bound=Message)
TokensEventT = TypeVar("TokensEventT", bound=RequestEvent | DecodeEvent)
log = logging.getLogger(__name__)

MAX_NUMBERED = 4096  # choices with a number in a session: the most recently numbered
MAX_ROWS = 4096  # in one event: at most 80 KB
MAX_NAMED = 256  # choices that get a number in one event: at most 90 KB


class NumberedChoice(NamedTuple):
    """One choice of one attempt at a request under one epoch, to which token rows refer by a
    number."""

    request: str
    attempt: bytes
    epoch: int
    choice: int


TokenRow = tuple[NumberedChoice, int, int]  # with the position and the id of its next token


class RowWriter:
    """The sender's side of token rows in one session: assigns numbers to choices, and collects the
    rows of the next event.

    The event must be taken when `pending` has MAX_ROWS or `named` has MAX_NAMED items.
    """

    def __init__(self) -> None:
        self._numbers: dict[NumberedChoice, int] = {}
        self._last_number = 0
        self.pending: list[tuple[int, int, int]] = []  # (number, position, id) of each row
        self.named: list[TokenRows.Named] = []

    def add(self, choice: NumberedChoice, position: int, id_: int) -> None:
        number = self._numbers.get(choice)
        if number is None:
            number = self._number(choice)
        self.pending.append((number, position, id_))

    def take(self) -> TokenRows:
        """Return an event with the rows collected so far, of which there must be at least one, and
        begin an empty event."""
        numbers, positions, ids = zip(*self.pending, strict=True)
        rows = TokenRows(named=self.named, numbers=numbers, positions=positions, ids=ids)
        self.pending, self.named = [], []
        return rows

    def _number(self, choice: NumberedChoice) -> int:
        """Assign a new number to a choice; return it. Numbers are never reused. With MAX_NUMBERED
        choices the oldest number is forgotten; its choice gets a new one with its next row."""
        if len(self._numbers) == MAX_NUMBERED:
            del self._numbers[next(iter(self._numbers))]
        self._last_number += 1
        self._numbers[choice] = self._last_number
        self.named.append(TokenRows.Named(number=self._last_number, **choice._asdict()))
        return self._last_number


class RowReader:
    """The receiver's side of token rows in one session: maps numbers back to choices."""

    def __init__(self) -> None:
        self._choices: dict[int, NumberedChoice] = {}

    def __len__(self) -> int:
        """Return how many numbers of choices are known."""
        return len(self._choices)

    def read(self, rows: TokenRows) -> Iterator[TokenRow]:
        """Yield each row of an event as (choice, position, token id). A row with an unknown number
        is skipped; the receiver detects the gap by the position of the next token."""
        for named in rows.named:
            choice = NumberedChoice(named.request, named.attempt, named.epoch, named.choice)
            self._choices[named.number] = choice
        return self._read(rows)

    def _read(self, rows: TokenRows) -> Iterator[TokenRow]:
        for number, position, id_ in zip(rows.numbers, rows.positions, rows.ids, strict=False):
            choice = self._choices.get(number)
            if choice is None:
                log.warning(
                    "ignoring a token: number %d was not assigned to a choice in this session",
                    number,
                )
            else:
                yield choice, position, id_
        # Only now: the sender has dropped these, but rows of this event may still use them.
        while len(self._choices) > MAX_NUMBERED:
            del self._choices[next(iter(self._choices))]


class Outbox(Generic[EventT]):
    """A queue of the events that one stream has not sent yet. `async for batch in outbox` yields
    them as lists, each of which fits into one message."""

    def __init__(self) -> None:
        self._events: list[EventT] = []
        self._wake = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: EventT) -> None:
        """Append an event, which then belongs to the outbox; if the outbox is closed, drop it."""
        if not self._closed:
            self._events.append(event)
            self._wake.set()

    def close(self) -> None:
        """Accept no more events; the iteration ends after those that are queued."""
        self._closed = True
        self._wake.set()

    def take(self) -> list[EventT]:
        """Remove and return the oldest events, as many as fit into one message; empty if none is
        queued."""
        size = count = 0
        for event in self._events:
            size += event.ByteSize()
            if count and size > MAX_BATCH_BYTES:
                break
            count += 1
        batch, self._events = self._events[:count], self._events[count:]
        return batch

    async def __aiter__(self) -> AsyncIterator[list[EventT]]:
        while True:
            if batch := self.take():
                yield batch
            elif self._closed:
                return
            else:
                self._wake.clear()
                await self._wake.wait()


class TokensOutbox(Outbox[TokensEventT]):
    """An Outbox that merges new tokens into queued Tokens events, or queues them as rows.
    `reads_rows`: whether the receiver understands TokenRows."""

    def __init__(self, kind: type[TokensEventT]) -> None:
        super().__init__()
        self.reads_rows = False
        self._kind = kind
        # The last unsent Tokens by attempt and choice.
        self._last_tokens: dict[tuple[bytes, int], TokensEventT] = {}
        self._rows = RowWriter()  # unsent rows, which follow the events

    def __len__(self) -> int:
        return len(self._events) + bool(self._rows.pending)

    def put(self, event: TokensEventT) -> None:
        """Append an event, or merge a Tokens event into a queued one of the same choice; if the
        outbox is closed, drop it.

        The event then belongs to the outbox, which may change it.
        """
        if self._closed:
            return
        self._end_rows()
        if event.WhichOneof("event") == "tokens":
            if self._merge(event.tokens):
                return
            self._last_tokens[event.tokens.attempt, event.tokens.choice] = event
        super().put(event)

    def put_token(self, choice: NumberedChoice, position: int, id_: int) -> bool:
        """Add a token without log-probabilities to an unfinished choice, as a row. Returns False
        and does nothing if the receiver does not read rows; the caller must then put the token as
        an event."""
        if not self.reads_rows:
            return False
        if not self._closed:
            rows = self._rows
            if not rows.pending:
                self._wake.set()
            rows.add(choice, position, id_)
            if len(rows.pending) == MAX_ROWS or len(rows.named) == MAX_NAMED:
                self._end_rows()
        return True

    def take(self) -> list[TokensEventT]:
        self._end_rows()
        batch = super().take()
        if not self._events:
            self._last_tokens.clear()
        elif batch:
            self._forget(batch)
        return batch

    def _end_rows(self) -> None:
        """Queue the collected rows as an event, so that an event put afterwards is sent after
        them."""
        if self._rows.pending:
            self._events.append(self._kind(rows=self._rows.take()))

    def _merge(self, new: pb.Tokens) -> bool:
        event = self._last_tokens.get((new.attempt, new.choice))
        if event is None:
            return False
        last = event.tokens
        if (
            last.finish
            or last.epoch != new.epoch
            or last.request != new.request
            or last.position + len(last.ids) != new.position
            or bool(last.logprobs) != bool(new.logprobs)
            or len(last.ids) + len(new.ids) > MAX_MERGED_IDS
            or len(last.logprobs) + len(new.logprobs) > MAX_MERGED_LOGPROBS
        ):
            return False
        last.ids.extend(new.ids)
        last.logprobs.extend(new.logprobs)
        last.finish = new.finish
        return True

    def _forget(self, batch: list[TokensEventT]) -> None:
        """Prevent that later tokens are merged into these events, which have left the queue."""
        for event in batch:
            key = (event.tokens.attempt, event.tokens.choice)
            if self._last_tokens.get(key) is event:
                del self._last_tokens[key]
