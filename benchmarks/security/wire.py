"""The data that a sniffer can read in its packets: the TCP streams, the hand-offs in them, and the
frames of KV that a ticket opens."""

import hashlib
import ipaddress
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from sniffer import LENGTH

from pdserve.engine.handoff.protocol import messages
from pdserve.engine.handoff.protocol.frames import (
    FRAME_TYPE,
    PREFIX_BYTES,
    FrameHeader,
    Prefix,
)
from pdserve.engine.handoff.protocol.keys import (
    SECRET_BYTES,
    Domain,
    Ticket,
    derive_keys,
    verified_payload,
)

ETHERNET_BYTES = 14
IPV4, TCP, SYN = 0x0800, 6, 2
HALF = 1 << 31


class Ends(NamedTuple):
    """One direction of a connection: source and destination."""

    source: str
    source_port: int
    target: str
    target_port: int


@dataclass
class Stream:
    """The segments of one direction: (sequence number, bytes)."""

    first: int  # the sequence number of its first byte
    segments: list[tuple[int, bytes]] = field(default_factory=list)

    def joined(self) -> tuple[bytes, int]:
        """(its bytes in order, the number of gaps)."""
        placed = [((at - self.first) & 0xFFFFFFFF, data) for at, data in self.segments]
        out, holes = bytearray(), 0
        for at, data in sorted(p for p in placed if p[0] < HALF):
            holes += at > len(out)
            out += data[max(0, len(out) - at) :]
        return bytes(out), holes


class Capture:
    """The packets of a file that the sniffer wrote."""

    def __init__(self, file: Path) -> None:
        self.other = bytearray()  # packets that are not TCP
        self.holes = 0
        self.streams: list[tuple[Ends, bytes]] = []
        found: dict[Ends, Stream] = {}
        for packet in _packets(file.read_bytes()):
            self._take(packet, found)
        for ends, stream in found.items():
            self._keep(ends, stream)

    def _take(self, packet: bytes, found: dict[Ends, Stream]) -> None:
        (kind,) = struct.unpack_from(">H", packet, ETHERNET_BYTES - 2)
        ip = packet[ETHERNET_BYTES:]
        if kind != IPV4 or ip[9] != TCP:
            self.other += packet
            return
        (size,) = struct.unpack_from(">H", ip, 2)
        tcp = ip[4 * (ip[0] & 15) : size]
        source, target = (str(ipaddress.ip_address(ip[at : at + 4])) for at in (12, 16))
        source_port, target_port, sequence = struct.unpack_from(">HHI", tcp)
        ends = Ends(source, source_port, target, target_port)
        if tcp[13] & SYN:
            if ends in found and found[ends].first != sequence + 1:  # the ports are reused
                self._keep(ends, found.pop(ends))
            found.setdefault(ends, Stream(sequence + 1))
        elif data := tcp[4 * (tcp[12] >> 4) :]:
            found.setdefault(ends, Stream(sequence)).segments.append((sequence, data))

    def _keep(self, ends: Ends, stream: Stream) -> None:
        data, holes = stream.joined()
        self.streams.append((ends, data))
        self.holes += holes

    def of_port(self, port: int, most: int | None = None) -> bytes:
        """Both directions of all connections to a port; without those longer than `most`."""
        there = [data for ends, data in self.streams if port in ends]
        return b"|".join(data for data in there if most is None or len(data) <= most)

    def to_port(self, port: int) -> list[bytes]:
        """Data sent to a port, by connection."""
        return [data for ends, data in self.streams if ends.target_port == port]

    @property
    def everything(self) -> bytes:
        return b"|".join([*(data for _, data in self.streams), bytes(self.other)])


def _packets(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        (size,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size
        yield data[at : at + size]
        at += size


class Frame(NamedTuple):
    """A frame of KV as captured: its header, the data that the header's tag covers, that tag, the
    payload."""

    header: FrameHeader
    covered: bytes
    tag: bytes
    payload: bytes


@dataclass
class Handoffs:
    """The public data of a data connection: its peers, and all frames."""

    hello: messages.Hello
    frames: list[Frame]

    @classmethod
    def read(cls, stream: bytes) -> "Handoffs":
        """Parse `stream`, which prefill sent to decode's KV port. Raises FrameError."""
        hello, frames, at = None, [], 0
        while at < len(stream):
            prefix = Prefix.unpack(stream[at : at + PREFIX_BYTES])
            record = stream[at : at + PREFIX_BYTES + prefix.length]
            at += len(record)
            if prefix.type == FRAME_TYPE:
                header, covered, tag = FrameHeader.unpack(record)
                payload = stream[at : at + header.payload_bytes]
                frames.append(Frame(header, covered, tag, payload))
                at += len(payload)
            elif isinstance(message := messages.decode(record), messages.Hello):
                hello = message
        assert hello is not None, "a connection begins with it"
        return cls(hello, frames)

    def of(self, ticket: bytes) -> list[Frame]:
        return [frame for frame in self.frames if frame.header.ticket == ticket]

    def opened(self, ticket: Ticket) -> int:
        """The number of a ticket's frames that it opens: their header and payload are genuine, and
        the payload is decrypted if it is sealed."""
        spec = hashlib.sha256(self.hello.spec).digest()
        key, count = derive_keys(ticket, spec, self.hello.identity.digest).to_decode, 0
        for header, covered, tag, payload in self.of(ticket.id):
            if not key.matches(Domain.HEADER, header.sequence, covered, tag):
                return count  # a wrong ticket opens none
            plain = verified_payload(
                key, header.sequence, memoryview(payload), header.payload_tag, self.hello.encrypted
            )
            count += plain is not None
        return count

    def opened_by_any(self, data: bytes, ticket: Ticket) -> tuple[int, int]:
        """(the number of candidates, the number of frames that the best of them opens). Each 32
        bytes of `data` are a candidate for the secret of that ticket, whose other fields are
        given."""
        candidates = {data[at : at + SECRET_BYTES] for at in range(len(data) - SECRET_BYTES + 1)}
        tried = (self.opened(_with(ticket, secret)) for secret in candidates)
        return len(candidates), max(tried, default=0)


def _with(ticket: Ticket, secret: bytes) -> Ticket:
    return Ticket(ticket.id, secret, ticket.attempt, ticket.prefill_boot, ticket.decode_boot)
