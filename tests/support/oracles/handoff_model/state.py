"""The state of the world: nested tuples, opened for a change one record at a time.

Attempt k of request r is number r * attempts + k. All messages in flight are here too; a message
that can no longer change its receiver is dropped (World.freeze).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum
from operator import attrgetter
from typing import Any

from oracles.handoff_model.config import FAULTS, Config
from oracles.handoff_model.machines import Handoffs, Leases, Routings
from oracles.handoff_model.memory import SPEC, DecodeBlocks, Memories, PrefillBlocks, Values
from oracles.handoff_model.rules import Rules
from pdserve.engine.handoff.protocol import Bitmap, Piece
from pdserve.services.router.request.state import Stage

State = tuple[Any, ...]
Message = Any  # a word, or a word and a number


_PLACE = {fault: place for place, fault in enumerate(FAULTS, 1)}


class End(IntEnum):
    """One end of an attempt's data connection."""

    NONE = 0
    DIALLING = 1
    UP = 2
    BROKEN = 3  # and this end has not noticed
    CLOSED = 4


@dataclass(slots=True)
class Req:
    """A request at the router."""

    machine: int = 0  # number of its Routing
    submitted: bool = False
    begun: int = 0  # attempts so far
    refused: int = 0  # of them those that decode refused, and whose names are still in use
    busy: bool = False  # decode has answered Busy since the last offer
    expired: bool = False  # its deadline has passed
    answer: str = ""  # "", "ok" or "failed": the client's answer


@dataclass(slots=True)
class Attempt:
    """An attempt at all processes."""

    prefill: int = -1  # the worker that the router chose, or -1
    to_decode: tuple[Message, ...] = ()  # router -> decode, in order
    late: tuple[Message, ...] = ()  # of a lost session, unread by decode: in any order
    from_decode: tuple[Message, ...] = ()  # in order
    alive: bool = False  # decode's messages reach the router
    orphaned: tuple[int, ...] = ()  # epochs whose sessions are over without decode having noticed
    to_prefill: tuple[Message, ...] = ()
    from_prefill: tuple[Message, ...] = ()
    known: bool = False  # prefill's service has it, and its messages reach the router
    decode_gone: bool = False  # the process of this attempt has died
    prefill_gone: bool = False
    claims: tuple[Message, ...] = ()  # prefill -> decode, in order
    grants: tuple[Message, ...] = ()  # decode -> prefill, in order
    frames: tuple[tuple[int, int], ...] = ()  # in flight, in any order: (block, value)
    decode_end: int = End.NONE
    prefill_end: int = End.NONE
    receive: int = 0  # number of decode's hand-off state, 0: none
    lease: int = 0  # number of its lease, 0: none
    last: str = ""  # its last message to the router, as long as its lease keeps it
    evicted: bool = False  # the engine has taken its blocks; the loop does not know yet
    bitmap: int = -1  # blocks verified and written, as a bit mask; -1: not reserved
    table: tuple[int, ...] = ()  # decode's blocks, as the reservation named them
    first: int = 0  # of them to be filled
    computed_heard: bool = False
    send: int = 0  # number of prefill's hand-off state, 0: none
    computed: int = 0  # blocks
    next: int = -1  # block to send; -1: not granted
    resent: bool = False


@dataclass(slots=True)
class Decode:
    """The decode process."""

    blocks: int = 0  # number of its DecodeBlocks
    values: tuple[int, ...] = ()  # by block, from block 1 on
    promised: int = 0  # blocks
    claims: tuple[int, ...] = ()  # attempts that wait in line
    frozen: bool = False


@dataclass(slots=True)
class Prefill:
    """A prefill process."""

    blocks: int = 0
    values: tuple[int, ...] = ()
    frozen: bool = False


def _closing(record: type) -> tuple[Callable[[Any], State], tuple[str, ...]]:
    """Return the function that makes a tuple of a record, and its names in order."""
    names = tuple(f.name for f in fields(record))
    return attrgetter(*names), names


_close_request, _of_request = _closing(Req)
_close_attempt, _of_attempt = _closing(Attempt)
_close_decode, _of_decode = _closing(Decode)
_close_prefill, _ = _closing(Prefill)
MACHINE = _of_request.index("machine")
RECEIVE = _of_attempt.index("receive")
CLAIMS = _of_decode.index("claims")
NO_ATTEMPT = _close_attempt(Attempt())


class Model:
    """Constant data of all states: bounds, rules, and the tables of real states."""

    def __init__(self, config: Config, rules: Rules) -> None:
        self.config = config
        self.rules = rules
        self.values = Values(config)
        self.handoffs = Handoffs(rules.step)
        self.leases = Leases(rules.lease_step)
        self.routings = Routings(rules.request_step, config)
        self.decode_blocks = Memories(DecodeBlocks(config, rules))
        self.prefill_blocks = Memories(PrefillBlocks(config))
        self._bitmaps: dict[tuple[int, int, int], Bitmap] = {}
        self.hears_computed = rules.is_complete is not Rules().is_complete  # else it is not read
        # The router's machine ignores messages about an attempt that is over; a wrong one may not.
        self.hears_all = rules.request_step is not Rules().request_step
        self.num_attempts = len(config.prompts) * config.attempts
        self.attempts = range(self.num_attempts)

    def initial(self) -> State:
        config = self.config
        decode = _close_decode(Decode(values=(0,) * config.blocks))
        prefill = _close_prefill(Prefill(values=(0,) * config.prefill_blocks))
        return (
            (config.at_once, *config.allowance),
            tuple(_close_request(Req(machine)) for machine in self.routings.first),
            (NO_ATTEMPT,) * self.num_attempts,
            decode,
            (prefill,) * config.prefills,
        )

    def bitmap(self, request: int, first: int, written: int) -> Bitmap:
        """Return the real bitmap of a prompt's hand-off with these blocks written. Read-only."""
        key = request, first, written
        found = self._bitmaps.get(key)
        if found is None:
            num_tokens = len(self.config.prompts[request]) - 1
            found = self._bitmaps[key] = Bitmap(SPEC, num_tokens, (first,))
            for block in range(written.bit_length()):
                if written >> block & 1:
                    found.add(Piece(0, range(1), range(block, block + 1)))
        return found

    def request_of(self, attempt: int) -> int:
        return attempt // self.config.attempts

    def title(self, attempt: int) -> str:
        """Return the attempt's title in a trace."""
        request, number = divmod(attempt, self.config.attempts)
        return f"request {request} attempt {number}"

    def live_lease(self, number: int) -> bool:
        return self.leases.live[number]


class World:
    """One state, open for reading and for one change. A record that was opened may be written."""

    __slots__ = ("_attempts", "_decode", "_prefills", "_requests", "left", "model", "state")

    def __init__(self, model: Model, state: State) -> None:
        self.model = model
        self.state = state
        self.left = state[0]
        self._requests: dict[int, Req] = {}
        self._attempts: dict[int, Attempt] = {}
        self._decode: Decode | None = None
        self._prefills: dict[int, Prefill] = {}

    @property
    def present(self) -> list[int]:
        """Return attempts of which anything exists (before the change)."""
        return [a for a, found in enumerate(self.state[2]) if found is not NO_ATTEMPT]

    def request(self, number: int) -> Req:
        found = self._requests.get(number)
        if found is None:
            found = self._requests[number] = Req(*self.state[1][number])
        return found

    def attempt(self, number: int) -> Attempt:
        found = self._attempts.get(number)
        if found is None:
            found = self._attempts[number] = Attempt(*self.state[2][number])
        return found

    @property
    def decode(self) -> Decode:
        if self._decode is None:
            self._decode = Decode(*self.state[3])
        return self._decode

    def prefill(self, number: int) -> Prefill:
        found = self._prefills.get(number)
        if found is None:
            found = self._prefills[number] = Prefill(*self.state[4][number])
        return found

    def _machine(self, request: int) -> int:
        """Return the number of a request's Routing, without opening the request."""
        found = self._requests.get(request)
        return self.state[1][request][MACHINE] if found is None else found.machine

    def stage(self, request: int) -> Stage:
        """Return the request's stage in the router."""
        return self.model.routings.stage[self._machine(request)]

    def ended(self, request: int) -> bool:
        return self.model.routings.ended[self._machine(request)]

    def is_current(self, attempt: int) -> bool:
        """Return whether the router waits for the attempt."""
        request, number = divmod(attempt, self.model.config.attempts)
        return self.model.routings.current[self._machine(request)] == number

    def _is_unheard(self, attempt: int) -> bool:
        """Return whether the router ignores every message about the attempt."""
        request, number = divmod(attempt, self.model.config.attempts)
        deaf = self.model.routings.deaf(self._machine(request), number)
        return deaf and not self.model.hears_all

    # faults

    def may_strike(self, fault: str) -> bool:
        return bool(self.left[0] and self.left[_PLACE[fault]])

    def strike(self, fault: str) -> None:
        left = list(self.left)
        left[0] -= 1
        left[_PLACE[fault]] -= 1
        self.left = (0,) * len(left) if not left[0] else tuple(left)

    # the real memories

    def decode_blocks(self) -> DecodeBlocks:
        """Return decode's blocks, read-only."""
        return self.model.decode_blocks.all[self.decode.blocks]

    def do_decode(self, operation: str, *arguments: int) -> Any:
        decode = self.decode
        decode.blocks, result = self.model.decode_blocks.do(decode.blocks, operation, *arguments)
        return result

    def prefill_blocks(self, number: int) -> PrefillBlocks:
        return self.model.prefill_blocks.all[self.prefill(number).blocks]

    def do_prefill(self, number: int, operation: str, argument: int) -> Any:
        prefill = self.prefill(number)
        blocks = self.model.prefill_blocks
        prefill.blocks, result = blocks.do(prefill.blocks, operation, argument)
        return result

    # ---

    def freeze(self) -> State:
        """Return the state after the change."""
        _, requests, attempts, decode, prefills = self.state
        if self._attempts:
            attempts = list(attempts)
            for number, attempt in self._attempts.items():
                attempts[number] = self._forgotten(number, attempt)
            attempts = tuple(attempts)
        if self._requests:
            requests = list(requests)
            for number, request in self._requests.items():
                requests[number] = _close_request(request)
            requests = tuple(requests)
        if self._prefills:
            prefills = list(prefills)
            for number, prefill in self._prefills.items():
                prefills[number] = _close_prefill(prefill)
            prefills = tuple(prefills)
        if decode[CLAIMS] or self._decode is not None:
            self.decode.claims = tuple(
                a for a in self.decode.claims if not self.model.handoffs.over[attempts[a][RECEIVE]]
            )  # those that have ended are popped unseen in their turn
            decode = _close_decode(self.decode)
        return self.left, requests, attempts, decode, prefills

    def _forgotten(self, number: int, a: Attempt) -> State:
        """Close the record, without data that can no longer change anything."""
        model = self.model
        handoffs, leases = model.handoffs, model.leases
        current = self.is_current(number)
        if not current and self._is_unheard(number):
            a.from_decode = a.from_prefill = ()
        if handoffs.over[a.receive]:
            if not a.receive or not model.rules.takes_frames(handoffs.all[a.receive]):
                a.frames = a.table = ()
                a.first, a.bitmap = 0, -1
            a.claims = tuple(m for m in a.claims if m == "claim")  # answered Gone
            a.computed_heard = False
            if a.decode_end == End.BROKEN and not a.claims:
                a.decode_end = End.CLOSED
        if handoffs.over[a.send]:
            a.grants = ()
            a.computed, a.next, a.resent = 0, -1, False
            if a.prefill_end in (End.BROKEN, End.UP):
                a.prefill_end = End.CLOSED
        request = current or any(
            m != "cancel" for m in (*a.to_decode, *a.late)
        )  # a router may still ask decode for it
        if not request and not leases.live[a.lease]:
            a.lease, a.last, a.evicted = 0, "", False
        if not a.lease:
            a.alive, a.orphaned = a.alive and request, ()
        busy = (
            request
            or a.from_decode or a.from_prefill
            or a.to_decode or a.late or a.to_prefill or a.claims or a.frames
            or a.lease or not handoffs.over[a.receive] or not handoffs.over[a.send]
            or a.prefill_end == End.DIALLING
        )  # fmt: skip
        return _close_attempt(a) if busy else NO_ATTEMPT
