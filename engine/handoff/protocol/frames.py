"""Frames: the binary records of a data connection, and the blocks that each frame carries; pure.

Every record starts with Prefix (8 bytes). A frame's record is FRAME_BYTES long: header fields, the
payload's tag, and the header's tag. The payload follows in a way that depends on the transport.
Decoders raise only FrameError and allocate nothing beyond the bounds given here.

A frame is whole blocks of a run of layers of one group. Physical block ids never travel: a frame
names absolute tokens. No frame names or writes a block before the first one that the receiver
requested: those are shared prefix blocks.
"""

import struct
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import and_
from typing import NamedTuple

from pdserve.engine.kv import KvSpec

MAGIC = 0x4B50
WIRE_VERSION = 6
TAG_BYTES = 16
MARK_BYTES = 8  # the leading bytes of a header's tag, by which a Credit names the frame's record
ID_BYTES = 16
MAX_CONTROL_BYTES = 8192
MAX_SLOT_BYTES = 64 << 20
FRAME_TYPE = 1

_PREFIX = struct.Struct("<HBBI")
_FRAME = struct.Struct("<16sQHHHHIIHHI16s")
PREFIX_BYTES = _PREFIX.size
FRAME_BODY_BYTES = _FRAME.size + TAG_BYTES
FRAME_BYTES = PREFIX_BYTES + FRAME_BODY_BYTES


class FrameError(Exception):
    """Raised for bytes of a peer that the wire format does not allow."""


class OtherVersion(FrameError):
    """Raised for a record with another version of the wire format."""


class Prefix(NamedTuple):
    """The start of every record; `length` counts the bytes after it."""

    type: int
    length: int

    def pack(self) -> bytes:
        return _PREFIX.pack(MAGIC, WIRE_VERSION, self.type, self.length)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> "Prefix":
        if len(data) != PREFIX_BYTES:
            raise FrameError("a record prefix has a wrong length")
        magic, version, kind, length = _PREFIX.unpack(data)
        if magic != MAGIC:
            raise FrameError("a record has a wrong magic number")
        if version != WIRE_VERSION:
            raise OtherVersion(f"wire version {WIRE_VERSION} on this side, {version} on the peer")
        bound = FRAME_BODY_BYTES if kind == FRAME_TYPE else MAX_CONTROL_BYTES
        if length > bound or (kind == FRAME_TYPE and length != bound):
            raise FrameError(f"a record of type {kind} has an invalid length of {length} bytes")
        return cls(kind, length)


class FrameHeader(NamedTuple):
    """Describes a payload: whole blocks of a run of layers of one group."""

    ticket: bytes
    sequence: int  # unique per ticket; also the nonce of both tags
    slot: int  # the slot of the connection that carries it
    group: int
    layers: range  # within the group
    tokens: range  # absolute; a multiple of the block size on both ends
    heads: range
    payload_bytes: int
    payload_tag: bytes

    def pack(self) -> bytes:
        """Return prefix and fields, which are exactly what the header's tag covers."""
        return Prefix(FRAME_TYPE, FRAME_BODY_BYTES).pack() + _FRAME.pack(
            self.ticket,
            self.sequence,
            self.slot,
            self.group,
            self.layers.start,
            self.layers.stop,
            self.tokens.start,
            self.tokens.stop,
            self.heads.start,
            self.heads.stop,
            self.payload_bytes,
            self.payload_tag,
        )

    @classmethod
    def unpack(cls, record: bytes | memoryview) -> tuple["FrameHeader", bytes, bytes]:
        """Return (header, the bytes that its tag covers, the tag). Raises FrameError."""
        if len(record) != FRAME_BYTES:
            raise FrameError("a frame header has a wrong length")
        record = bytes(record)
        if Prefix.unpack(record[:PREFIX_BYTES]).type != FRAME_TYPE:
            raise FrameError("the record is not a frame")
        ticket, sequence, slot, group, l0, l1, t0, t1, h0, h1, size, tag = _FRAME.unpack(
            record[PREFIX_BYTES:-TAG_BYTES]
        )
        if not (l0 < l1 and t0 < t1 and h0 < h1 and 0 < size <= MAX_SLOT_BYTES):
            raise FrameError("a frame header has an empty or oversized range")
        header = cls(
            ticket, sequence, slot, group, range(l0, l1), range(t0, t1), range(h0, h1), size, tag
        )
        return header, record[:-TAG_BYTES], record[-TAG_BYTES:]


def renamed(covered: bytes, ticket: bytes) -> bytes:
    """Return the bytes that the tag of a frame or message would cover if it named another ticket;
    in both, the ticket's id follows the prefix."""
    return covered[:PREFIX_BYTES] + ticket + covered[PREFIX_BYTES + ID_BYTES :]


def mark_of(record: bytes) -> bytes:
    """Return MARK_BYTES that differ from those of every other record of the connection."""
    return record[-TAG_BYTES:][:MARK_BYTES]


SLOT_BYTES = 4 << 20  # the largest payload of a frame, unless one block of one layer is larger


def slot_bytes(spec: KvSpec) -> int:
    """Bytes of the largest payload of a frame."""
    return max(SLOT_BYTES, *(g.block_bytes(spec.block_size) for g in spec.groups))


class Piece(NamedTuple):
    """The content of one frame."""

    group: int
    layers: range  # within the group
    blocks: range  # logical: block i holds tokens [i * block_size, (i + 1) * block_size)

    def overlaps(self, other: "Piece") -> bool:
        """Return whether the two have a block of a layer in common."""
        return (
            self.group == other.group
            and max(self.layers.start, other.layers.start)
            < min(self.layers.stop, other.layers.stop)
            and max(self.blocks.start, other.blocks.start)
            < min(self.blocks.stop, other.blocks.stop)
        )


def cut(spec: KvSpec, group: int, blocks: range, limit: int) -> Iterator[Piece]:
    """Yield pieces of at most `limit` bytes, or one block, that cover all layers of `blocks`
    once."""
    layer_group = spec.groups[group]
    block_bytes = layer_group.block_bytes(spec.block_size)
    num_layers = len(layer_group.layers)
    per_layer = max(1, min(len(blocks), limit // block_bytes))
    for start in range(blocks.start, blocks.stop, per_layer):
        run = range(start, min(start + per_layer, blocks.stop))
        layers = max(1, limit // (block_bytes * len(run)))
        for layer in range(0, num_layers, layers):
            yield Piece(group, range(layer, min(layer + layers, num_layers)), run)


class Bitmap:
    """Tracks which (group, layer, block) cells of one prompt are verified and written."""

    def __init__(self, spec: KvSpec, num_tokens: int, first_blocks: Sequence[int]) -> None:
        self._spec = spec
        self._end = -(-num_tokens // spec.block_size)
        self._first = tuple(min(first, self._end) for first in first_blocks)
        self._present = [[0] * len(g.layers) for g in spec.groups]
        self._missing = sum(
            len(g.layers) * (self._end - first)
            for g, first in zip(spec.groups, self._first, strict=True)
        )

    @property
    def num_missing(self) -> int:
        return self._missing

    @property
    def missing_blocks(self) -> float:
        """The missing cells, counted in blocks of all layers."""
        return self._missing / sum(len(g.layers) for g in self._spec.groups)

    @property
    def complete(self) -> bool:
        return self._missing == 0

    @property
    def num_leading(self) -> int:
        """Number of leading blocks that all layers have, or that were not requested."""
        lead = self._end
        for layers, first in zip(self._present, self._first, strict=True):
            present = (1 << first) - 1
            present |= reduce(and_, layers)
            lead = min(
                lead, (~present & (present + 1)).bit_length() - 1
            )  # the lowest bit that is 0
        return lead

    def piece(self, header: FrameHeader) -> Piece:
        """Return the piece of a verified header. Raises FrameError if the prompt lacks it."""
        size = self._spec.block_size
        if header.group >= len(self._spec.groups):
            raise FrameError(f"layer group {header.group} does not exist")
        group = self._spec.groups[header.group]
        if header.tokens.start % size or header.tokens.stop % size:
            raise FrameError("the token range does not cover whole blocks")
        blocks = range(header.tokens.start // size, header.tokens.stop // size)
        if blocks.start < self._first[header.group] or blocks.stop > self._end:
            raise FrameError(f"blocks {blocks.start}-{blocks.stop} were not requested")
        if header.layers.stop > len(group.layers):
            raise FrameError(f"group {header.group} has only {len(group.layers)} layers")
        if header.heads != range(group.head_start, group.head_end):
            raise FrameError(
                f"heads {header.heads.start}-{header.heads.stop} do not match the layout"
            )
        expected = len(header.layers) * len(blocks) * group.block_bytes(size)
        if header.payload_bytes != expected:
            raise FrameError(f"the payload has {header.payload_bytes} bytes; expected {expected}")
        return Piece(header.group, header.layers, blocks)

    def has(self, piece: Piece) -> bool:
        mask = self._mask(piece)
        present = self._present[piece.group]
        return all(present[layer] & mask == mask for layer in piece.layers)

    def touches(self, piece: Piece) -> bool:
        """Return whether any cell of the piece is present."""
        mask = self._mask(piece)
        return any(self._present[piece.group][layer] & mask for layer in piece.layers)

    def add(self, piece: Piece) -> None:
        mask = self._mask(piece)
        present = self._present[piece.group]
        for layer in piece.layers:
            self._missing -= (mask & ~present[layer]).bit_count()
            present[layer] |= mask

    def _mask(self, piece: Piece) -> int:
        return ((1 << len(piece.blocks)) - 1) << piece.blocks.start
