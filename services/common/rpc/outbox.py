"""Queues events for a slow peer. Writers never block.

Used on the loop's thread only. Order is kept, except that Tokens may merge into unsent Tokens of
the same choice that they continue, and so overtake events of other choices.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from google.protobuf.message import Message

from pdserve.protos import common_pb2 as pb
from pdserve.protos.router_pb2 import RequestEvent
from pdserve.protos.worker_pb2 import DecodeEvent
from pdserve.services.common.rpc.token_rows import MAX_NAMED, MAX_ROWS, NumberedChoice, RowWriter

MAX_BATCH_BYTES = 192 << 10  # of the events in one message; a larger event travels alone
MAX_MERGED_IDS = 1024
MAX_MERGED_LOGPROBS = 256  # a candidate has about 10 bytes, a token up to 20 candidates

EventT = TypeVar("EventT", bound=Message)
TokensEventT = TypeVar("TokensEventT", bound=RequestEvent | DecodeEvent)


class Outbox(Generic[EventT]):
    """The unsent events of one stream. `async for batch in outbox` yields lists of events."""

    def __init__(self) -> None:
        self._events: list[EventT] = []
        self._wake = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: EventT) -> None:
        """Append an event, which the outbox then owns; dropped once closed."""
        if not self._closed:
            self._events.append(event)
            self._wake.set()

    def close(self) -> None:
        """End the iteration after the events that were put so far."""
        self._closed = True
        self._wake.set()

    def take(self) -> list[EventT]:
        """The oldest events that fit one message; empty if there are none."""
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
    """An Outbox that merges Tokens events. `reads_rows`: whether the receiver reads TokenRows."""

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
        """Append, or merge Tokens into unsent ones of their choice; dropped once closed.

        The outbox owns the event from here on and may change it.
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
        """Add a token without log-probabilities to a choice that continues. Returns False if the
        receiver reads no rows, so that the token must be put as an event."""
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
        """Turn the pending rows into an event, so that the next event follows them."""
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
        """Prevent merges into events that are sent."""
        for event in batch:
            key = (event.tokens.attempt, event.tokens.choice)
            if self._last_tokens.get(key) is event:
                del self._last_tokens[key]
