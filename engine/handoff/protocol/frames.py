"""Frames, the binary records that carry KV on a data connection, and the blocks in each frame;
pure.

Every record starts with Prefix (8 bytes). A frame's record is FRAME_BYTES long: header fields, the
payload's tag, and the header's tag. How the payload follows depends on the transport. Decoders
raise only FrameError and allocate nothing beyond the bounds given in this module.

A frame holds whole blocks of adjacent layers of one layer group. It names its blocks by the
positions of their tokens in the prompt; numbers of pool blocks are never sent. No frame names or
writes a block before the first one that decode requested: earlier blocks belong to the shared
prefix cache.
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
    """Raised if bytes from a peer violate the wire format or the protocol."""


class OtherVersion(FrameError):
    """Raised if a record has another version of the wire format than this process."""


class Prefix(NamedTuple):
    """The first bytes of every record: its type, and the number of bytes after the prefix."""

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
    """The header of a frame: which whole blocks, of which adjacent layers of one layer group, its
    payload holds."""

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
        """Return the prefix and the header's fields, exactly the bytes that the header's tag
        covers."""
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
        """Decode a frame's record; return (header, the bytes that the header's tag covers, the
        header's tag). Raises FrameError."""
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
    """Return `covered`, the bytes that a record's tag covers, with the ticket's id replaced by
    `ticket`. Frames and signed messages both have that id right after the prefix."""
    return covered[:PREFIX_BYTES] + ticket + covered[PREFIX_BYTES + ID_BYTES :]


def mark_of(record: bytes) -> bytes:
    """Return a record's mark: MARK_BYTES of its tag, which differ for each record of a
    connection."""
    return record[-TAG_BYTES:][:MARK_BYTES]


SLOT_BYTES = 4 << 20  # the largest payload of a frame, unless one block of one layer is larger


def slot_bytes(spec: KvSpec) -> int:
    """Return the size of the largest payload of a frame, in bytes."""
    return max(SLOT_BYTES, *(g.block_bytes(spec.block_size) for g in spec.groups))


class Piece(NamedTuple):
    """The content of one frame: a range of blocks in a range of layers of one layer group."""

    group: int
    layers: range  # within the group
    blocks: range  # logical: block i holds tokens [i * block_size, (i + 1) * block_size)

    def overlaps(self, other: "Piece") -> bool:
        """Return whether the two pieces have a block of a layer in common."""
        return (
            self.group == other.group
            and max(self.layers.start, other.layers.start)
            < min(self.layers.stop, other.layers.stop)
            and max(self.blocks.start, other.blocks.start)
            < min(self.blocks.stop, other.blocks.stop)
        )


def cut(spec: KvSpec, group: int, blocks: range, limit: int) -> Iterator[Piece]:
    """Cut `blocks` of all layers of a layer group into pieces for frames, and yield them. A piece
    has at most `limit` bytes, or is one block of one layer if that is larger."""
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
    """Tracks which cells of a prompt's KV are verified and written; a cell is one layer of one
    block."""

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
        """Number of blocks that are not written; a block of which some layers are written counts in
        part."""
        return self._missing / sum(len(g.layers) for g in self._spec.groups)

    @property
    def complete(self) -> bool:
        return self._missing == 0

    @property
    def num_leading(self) -> int:
        """Number of blocks from the prompt's start that are complete in all layers, including those
        that were not requested because decode has them cached."""
        lead = self._end
        for layers, first in zip(self._present, self._first, strict=True):
            present = (1 << first) - 1
            present |= reduce(and_, layers)
            lead = min(
                lead, (~present & (present + 1)).bit_length() - 1
            )  # the lowest bit that is 0
        return lead

    def piece(self, header: FrameHeader) -> Piece:
        """Return the piece that a verified header describes. Raises FrameError if the prompt has no
        such blocks or layers, or if they were not requested."""
        size = self._spec.block_size
        if header.group >= len(self._spec.groups):
            raise FrameError(f"the KV layout has no layer group {header.group}")
        group = self._spec.groups[header.group]
        if header.tokens.start % size or header.tokens.stop % size:
            raise FrameError("the frame's token range does not cover whole blocks")
        blocks = range(header.tokens.start // size, header.tokens.stop // size)
        if blocks.start < self._first[header.group] or blocks.stop > self._end:
            raise FrameError(f"the frame's blocks {blocks.start}-{blocks.stop} were not requested")
        if header.layers.stop > len(group.layers):
            raise FrameError(f"layer group {header.group} has only {len(group.layers)} layers")
        if header.heads != range(group.head_start, group.head_end):
            raise FrameError(
                f"heads {header.heads.start}-{header.heads.stop} do not match the KV layout"
            )
        expected = len(header.layers) * len(blocks) * group.block_bytes(size)
        if header.payload_bytes != expected:
            raise FrameError(
                f"the frame's payload has {header.payload_bytes} bytes; expected {expected}"
            )
        return Piece(header.group, header.layers, blocks)

    def has(self, piece: Piece) -> bool:
        mask = self._mask(piece)
        present = self._present[piece.group]
        return all(present[layer] & mask == mask for layer in piece.layers)

    def touches(self, piece: Piece) -> bool:
        """Return whether any cell of the piece is written already."""
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
