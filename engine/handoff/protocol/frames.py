"""The binary records of a data connection: the prefix of every record and the header of a KV frame.

Every record starts with Prefix (8 bytes). A frame's record is FRAME_BYTES long: header fields, the
payload's tag, and the header's tag. The payload follows in a way that depends on the transport.
Decoders raise only FrameError and allocate nothing beyond the bounds given here. Physical block ids
never travel: a frame names absolute tokens.
"""

import struct
from typing import NamedTuple

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
