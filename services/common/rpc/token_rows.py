"""Encodes the tokens of a step as rows: three columns of one event, for any number of streams.

A choice gets a number with its first row in a session, so a row is a number, a position and an id.
"""

import logging
from collections.abc import Iterator
from typing import NamedTuple

from pdserve.protos.common_pb2 import TokenRows

log = logging.getLogger(__name__)

MAX_NUMBERED = 4096  # choices with a number in a session: the most recently numbered
MAX_ROWS = 4096  # in one event: at most 80 KB
MAX_NAMED = 256  # choices that get a number in one event: at most 90 KB


class NumberedChoice(NamedTuple):
    """A choice of an attempt at a request, under one epoch, which rows refer to by number."""

    request: str
    attempt: bytes
    epoch: int
    choice: int


TokenRow = tuple[NumberedChoice, int, int]  # with the position and the id of its next token


class RowWriter:
    """The sender's side of one session: its numbers, and the rows of the next event.

    The event is full with MAX_ROWS in `pending` or MAX_NAMED in `named`.
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
        """The event, which must have rows; starts an empty one."""
        numbers, positions, ids = zip(*self.pending, strict=True)
        rows = TokenRows(named=self.named, numbers=numbers, positions=positions, ids=ids)
        self.pending, self.named = [], []
        return rows

    def _number(self, choice: NumberedChoice) -> int:
        """Assign a number, never one used before. A choice whose number is dropped gets another
        with its next row."""
        if len(self._numbers) == MAX_NUMBERED:
            del self._numbers[next(iter(self._numbers))]
        self._last_number += 1
        self._numbers[choice] = self._last_number
        self.named.append(TokenRows.Named(number=self._last_number, **choice._asdict()))
        return self._last_number


class RowReader:
    """The receiver's side of one session."""

    def __init__(self) -> None:
        self._choices: dict[int, NumberedChoice] = {}

    def __len__(self) -> int:
        """The count of known numbers."""
        return len(self._choices)

    def read(self, rows: TokenRows) -> Iterator[TokenRow]:
        """The rows. A row with an unknown number is skipped; the receiver of later tokens detects
        the gap."""
        for named in rows.named:
            choice = NumberedChoice(named.request, named.attempt, named.epoch, named.choice)
            self._choices[named.number] = choice
        return self._read(rows)

    def _read(self, rows: TokenRows) -> Iterator[TokenRow]:
        for number, position, id_ in zip(rows.numbers, rows.positions, rows.ids, strict=False):
            choice = self._choices.get(number)
            if choice is None:
                log.warning("ignoring a token of an unknown choice: number %d", number)
            else:
                yield choice, position, id_
        # Only now: the sender has dropped these, but rows of this event may still use them.
        while len(self._choices) > MAX_NUMBERED:
            del self._choices[next(iter(self._choices))]
