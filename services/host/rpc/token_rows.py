"""Tokens in rows: after the first ones of a choice, a session names it by a number.

Tokens say what they are of, and its number; TokenRows have numbers, positions and ids. So the
tokens of a step are three columns of one event, however many streams there are.
"""

from collections.abc import Iterator
from typing import NamedTuple

from pdserve.protos.common_pb2 import TokenRows, Tokens

MAX_NUMBERED = 1 << 14  # choices of a session that have numbers, from 1 on
MAX_ROWS = 4096  # in one event: at most 60 KB


class NumberedChoice(NamedTuple):
    """What a number stands for: a choice of an attempt at a request, under one epoch."""

    request: str
    attempt: bytes
    epoch: int
    choice: int


TokenRow = tuple[NumberedChoice, int, int]  # and the position and the id of its next token


class ChoiceNumbers:
    """The sender's side. A choice keeps its number until its last tokens. Beyond MAX_NUMBERED the
    choice that was numbered first loses its number, and gets another when it goes on."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[bytes, int, int], int] = {}  # by attempt, epoch and choice
        self._free: list[int] = []

    def get(self, attempt: bytes, epoch: int, choice: int) -> int:
        """The number of a choice; 0: it has none."""
        return self._numbers.get((attempt, epoch, choice), 0)

    def note(self, tokens: Tokens) -> None:
        """Write the number of their choice into tokens that go out; the last ones give it back."""
        key = (tokens.attempt, tokens.epoch, tokens.choice)
        number = self._numbers.get(key, 0)
        if not tokens.finish:
            tokens.number = self._numbers[key] = number or self._unused()
        elif number:
            del self._numbers[key]
            self._free.append(number)

    def _unused(self) -> int:
        if self._free:
            return self._free.pop()
        if len(self._numbers) >= MAX_NUMBERED:
            return self._numbers.pop(next(iter(self._numbers)))
        return len(self._numbers) + 1


class NumberedChoices:
    """The receiver's side: what the numbers of one session stand for."""

    def __init__(self) -> None:
        self._choices: dict[int, NumberedChoice] = {}

    def note(self, tokens: Tokens) -> None:
        """Read the number in tokens that came."""
        if 0 < tokens.number <= MAX_NUMBERED:
            self._choices[tokens.number] = NumberedChoice(
                tokens.request, tokens.attempt, tokens.epoch, tokens.choice
            )

    def of(self, rows: TokenRows) -> Iterator[TokenRow]:
        """The rows. One whose number was never said is left
        out: the gap is found by whoever receives what follows it."""
        for number, position, id_ in zip(rows.numbers, rows.positions, rows.ids, strict=False):
            choice = self._choices.get(number)
            if choice is not None:
                yield choice, position, id_


class UnsentRows:
    """Rows that are to be one TokenRows."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._positions: list[int] = []
        self._ids: list[int] = []

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, number: int, position: int, id_: int) -> None:
        self._numbers.append(number)
        self._positions.append(position)
        self._ids.append(id_)

    def take(self) -> TokenRows:
        """All of them; none is left."""
        rows = TokenRows(numbers=self._numbers, positions=self._positions, ids=self._ids)
        self._numbers, self._positions, self._ids = [], [], []
        return rows
