"""A peer that knows tickets and breaks every rule, against a real Receiver over a real transport.

Only frames can change the pool of a `Victim` (victim.py). `Attack` keeps a bystander's half-filled
hand-off and a separate one there, sends records that must change nothing, and compares the pool's
bytes and every bitmap before and after.
"""

import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from systems.victim import BLOCK, NUM_TOKENS, Victim

from pdserve.engine.handoff.protocol import (
    PREFIX_BYTES,
    Domain,
    FrameHeader,
    Piece,
    Prefix,
    Ticket,
    TicketKeys,
    derive_keys,
    messages,
)
from pdserve.engine.kv import encode_spec, spec_digest
from pdserve.engine.transport import SLOTS, Wire, WireClosed

GENUINE = range(7)  # the blocks that are really sent
Record = tuple[bytes, bytes]  # a frame's record, its payload


@dataclass
class Held:
    """A granted hand-off: its ticket, keys, and the frames that have been verified."""

    ticket: Ticket
    keys: TicketKeys
    sequence: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    sent: list[Record] = field(default_factory=list)


class Peer:
    """One connection after its introduction."""

    def __init__(self, victim: Victim, incarnation: bytes) -> None:
        self.victim = victim
        self.incarnation = incarnation
        self.wire: Wire = victim.transport.dial(victim.target, 5.0)
        self.wire.deadline = time.monotonic() + 3600
        hello = messages.Hello(
            incarnation,
            victim.incarnation,
            victim.engine.kv_identity,
            victim.transport.name,
            encode_spec(victim.spec),
            victim.encrypted,
        )
        self.wire.write(messages.encode(hello))
        assert isinstance(self.reply(), messages.Welcome)

    def reply(self) -> messages.Message | None:
        """Return the next record; None: the connection is closed."""
        try:
            head = self.wire.take(PREFIX_BYTES)
            body = self.wire.take(Prefix.unpack(head).length)
        except WireClosed:
            return None
        return messages.decode(head + body)

    def claim(self) -> Held:
        ticket = self.victim.admit(self.incarnation)
        digest = spec_digest(self.victim.spec)
        held = Held(ticket, derive_keys(ticket, digest, self.victim.engine.kv_identity.digest))
        claim = messages.sign(
            messages.Claim(NUM_TOKENS, 0), ticket.id, next(held.sequence), held.keys.to_decode
        )
        self.wire.write(claim)
        while not isinstance(getattr(self.reply(), "body", None), messages.Granted):
            pass
        return held

    def frame(self, held: Held, piece: Piece, slot: int, key: Any = None) -> Record:
        """Return a genuine frame of random content; `key`: signed with another key."""
        key = key or held.keys.to_decode
        group = self.victim.spec.groups[piece.group]
        size = len(piece.layers) * len(piece.blocks) * group.block_bytes(BLOCK)
        payload, sequence = os.urandom(size), next(held.sequence)
        if self.victim.encrypted:
            sealed = key.seal(sequence, payload)
            payload, tag = bytes(sealed[:size]), bytes(sealed[size:])
        else:
            tag = key.tag(Domain.PAYLOAD, sequence, payload)
        header = FrameHeader(
            held.ticket.id, sequence, slot, piece.group, piece.layers,
            range(piece.blocks.start * BLOCK, piece.blocks.stop * BLOCK),
            range(group.head_start, group.head_end), size, tag,
        )  # fmt: skip
        return self.signed(header, key), payload

    @staticmethod
    def signed(header: FrameHeader, key: Any) -> bytes:
        covered = header.pack()
        return covered + bytes(key.tag(Domain.HEADER, header.sequence, covered))

    def send(self, record: Record, slot: int) -> None:
        head, payload = record
        self.wire.send_frame(head, slot, [memoryview(payload)], lambda: None)

    def outcome(self) -> str:
        """Return the outcome of one frame: "credit", "closed"; Acks and Nacks are skipped."""
        while True:
            match self.reply():
                case None:
                    return "closed"
                case messages.Credit():
                    return "credit"

    def fill(self, held: Held) -> None:
        """Send some genuine blocks, and wait until they are in the pool."""
        before = self.victim.writes
        for block in GENUINE:
            record = self.frame(held, Piece(0, range(1), range(block, block + 1)), block % SLOTS)
            self.send(record, block % SLOTS)
            assert self.outcome() == "credit"
            held.sent.append(record)
        self.victim.settle()
        assert self.victim.writes == before + len(GENUINE)

    def close(self) -> None:
        self.wire.close()


class Attack:
    """`run(count)` sends this many frames; `kinds` and `outcomes` count them."""

    def __init__(self, victim: Victim, seed: int) -> None:
        self.victim = victim
        self.kinds: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.rng = random.Random(seed)
        self.incarnation = os.urandom(16)
        self.bystander = Peer(victim, self.incarnation)
        self.by_held = self.bystander.claim()
        self.bystander.fill(self.by_held)
        self.stale: list[Record] = []
        self.peer, self.held = self._fresh()
        self.staying: dict[str, Callable[[int], Record]] = {
            "payload bit flipped": self._bad_payload,
            "payload of another frame": self._swapped_payload,
            "replay of a verified frame": self._replay,
            "verified header, other payload": self._replay_with_other_payload,
            "stale: its attempt has ended": self._stale,
            "foreign: an unknown ticket": self._unknown_ticket,
            "foreign: of another connection": self._of_the_bystander,
        }
        self.closing: dict[str, Callable[[int], Record]] = {
            "header bit flipped": self._bad_header,
            "foreign: signed with another ticket's key": self._other_key,
            "foreign: decode's own key": self._reflected,
            "foreign: another ticket's frame renamed": self._renamed,
            "slot out of range": self._bad_slot,
        }

    def run(self, count: int, closing_share: float = 0.1) -> None:
        """Send frames; half of the closing ones are truncated: cut anywhere, then the end."""
        left = count
        while left:
            if self.rng.random() < closing_share * 8:
                self._closing()
                left -= 1
            batch = min(left, 8)
            self._staying(batch)
            left -= batch

    def __enter__(self) -> "Attack":
        return self

    def __exit__(self, *failure: object) -> None:
        self.peer.close()
        self.bystander.close()

    # the steps

    def _fresh(self) -> tuple[Peer, Held]:
        peer = Peer(self.victim, self.incarnation)
        held = peer.claim()
        peer.fill(held)
        self._before = self._state(held)
        return peer, held

    def _state(self, held: Held) -> dict[str, Any]:
        return self.victim.state([self.by_held.ticket.id, held.ticket.id])

    def _staying(self, count: int) -> None:
        for slot in range(count):
            kind = self.rng.choice(list(self.staying))
            self.peer.send(self.staying[kind](slot), slot)
            self.kinds[kind] += 1
        for _ in range(count):
            outcome = self.peer.outcome()
            assert outcome == "credit"
            self.outcomes["connection goes on"] += 1
        self._expect(self._before, "frames of a batch")

    def _closing(self) -> None:
        kind = self.rng.choice([*self.closing, *["truncated"] * len(self.closing)])
        attempt = self.held.ticket.attempt
        if kind == "truncated":
            head, payload = self.peer.frame(self.held, self._missing(), 0)
            sent = head + payload if self.victim.transport.name == "tcp" else head
            self.peer.wire.write(sent[: self.rng.randrange(1, len(sent))])
            self.peer.close()
            outcome = "closed"
        else:
            self.peer.send(self.closing[kind](0), 0)
            outcome = self.peer.outcome()
        self.kinds[kind] += 1
        self.outcomes["connection closed" if outcome == "closed" else "connection goes on"] += 1
        before = self._before
        if outcome == "closed":
            self.victim.wait(lambda: attempt in self.victim.lost)
            del before["bitmaps"][self.held.ticket.id.hex()]
        self._expect(before, kind)
        if outcome == "closed":
            self.peer.close()
            self.stale = self.held.sent + self.stale[:20]
            self.peer, self.held = self._fresh()

    def _expect(self, before: dict[str, Any], kind: str) -> None:
        now = self._state(self.held)
        assert now == before, (kind, before, now, self.victim.lost.get(self.by_held.ticket.attempt))

    # the records

    def _missing(self) -> Piece:
        """Return blocks that the hand-off still lacks."""
        group = self.rng.randrange(2)
        first = self.rng.randrange(GENUINE.stop, 14)
        return Piece(group, range(1), range(first, self.rng.randrange(first + 1, 16)))

    def _flip(self, data: bytes) -> bytes:
        changed = bytearray(data)
        changed[self.rng.randrange(len(changed))] ^= 1 << self.rng.randrange(8)
        return bytes(changed)

    def _bad_payload(self, slot: int) -> Record:
        head, payload = self.peer.frame(self.held, self._missing(), slot)
        return head, self._flip(payload)

    def _swapped_payload(self, slot: int) -> Record:
        piece = self._missing()
        (head, _), (_, other) = (self.peer.frame(self.held, piece, slot) for _ in range(2))
        return head, other

    def _replay(self, slot: int) -> Record:
        return self._in_slot(self.rng.choice(self.held.sent), slot, self.held)

    def _replay_with_other_payload(self, slot: int) -> Record:
        head, payload = self._replay(slot)
        return head, os.urandom(len(payload))

    def _stale(self, slot: int) -> Record:
        """Return a frame of an attempt that has ended; before the first one has, of an unknown
        ticket.
        """
        if not self.stale:
            return self._unknown_ticket(slot)
        return self._moved(self.rng.choice(self.stale), slot)

    def _unknown_ticket(self, slot: int) -> Record:
        head, payload = self.peer.frame(self.held, self._missing(), slot)
        header, _, _ = FrameHeader.unpack(head)
        unknown = header._replace(ticket=os.urandom(16))
        return self.peer.signed(unknown, self.held.keys.to_decode), payload

    def _of_the_bystander(self, slot: int) -> Record:
        """Return a genuine, wanted frame, but on a connection that does not hold its ticket."""
        return self.bystander.frame(self.by_held, self._missing(), slot)

    def _bad_header(self, slot: int) -> Record:
        head, payload = self.peer.frame(self.held, self._missing(), slot)
        return self._flip(head), payload

    def _other_key(self, slot: int) -> Record:
        return self.peer.frame(self.held, self._missing(), slot, self.by_held.keys.to_decode)

    def _reflected(self, slot: int) -> Record:
        return self.peer.frame(self.held, self._missing(), slot, self.held.keys.to_prefill)

    def _renamed(self, slot: int) -> Record:
        head, payload = self.bystander.frame(self.by_held, self._missing(), slot)
        return head.replace(self.by_held.ticket.id, self.held.ticket.id), payload

    def _bad_slot(self, slot: int) -> Record:
        head, payload = self.peer.frame(self.held, self._missing(), SLOTS + slot)
        return head, payload

    def _in_slot(self, record: Record, slot: int, held: Held) -> Record:
        """Return a verified frame again, byte for byte; signed again only if its slot is
        another.
        """
        head, payload = record
        header, _, _ = FrameHeader.unpack(head)
        if header.slot == slot:
            return record
        return self.peer.signed(header._replace(slot=slot), held.keys.to_decode), payload

    def _moved(self, record: Record, slot: int) -> Record:
        """Name the frame's current slot, with the old tag, which is then wrong but is not checked
        that early.
        """
        head, payload = record
        header, _, _ = FrameHeader.unpack(head)
        return header._replace(slot=slot).pack() + head[-16:], payload
