"""The control messages of a data connection, of bounded size. Messages about an attempt carry a
tag; before the first Claim, decode compares what both sides must agree on.

Prefill sends Hello, and decode answers Welcome or Refused. Per attempt, prefill sends Claim and
decode answers Granted or Gone; until the attempt ends, Computed, Ack, Nack, Progress, Complete and
Abort follow. Credit returns a slot. `decode` raises only FrameError; a message about an attempt is
unauthenticated until `Signed.tag` is checked.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from pdserve.engine.handoff.protocol.frames import (
    ID_BYTES,
    MARK_BYTES,
    MAX_CONTROL_BYTES,
    PREFIX_BYTES,
    TAG_BYTES,
    FrameError,
    Prefix,
)
from pdserve.engine.handoff.protocol.keys import Domain, TagKey
from pdserve.engine.kv import (
    KvIdentity,
    KvSpec,
    Mixing,
    decode_identity,
    decode_spec,
    encode_identity,
    refusal,
    spec_difference,
)

MAX_SEQUENCES = 512  # of one Ack
MAX_GROUPS = 255  # layer groups; Granted has one block for each
MAX_REASON_BYTES = 240
PROOF_BYTES = 16
SIDES = ("at decode", "at prefill")


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message on a connection, from prefill to decode: who prefill is and what its KV is
    like. `spec` is the encoded KvSpec, so that decode can say what differs."""

    TYPE: ClassVar[int] = 2
    prefill_incarnation: bytes
    decode_incarnation: bytes  # the process that prefill wants to reach
    identity: KvIdentity
    transport: str
    spec: bytes
    encrypted: bool = False  # payloads are sealed, not only tagged


@dataclass(frozen=True, slots=True)
class Welcome:
    """Decode's answer to Hello: it accepts the connection. `proof` holds bytes that prefill put
    into the transport's window, which shows that decode can read them."""

    TYPE: ClassVar[int] = 3
    proof: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    TYPE: ClassVar[int] = 4
    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """From decode to prefill: decode does not know the ticket's attempt, or the attempt has
    ended."""

    TYPE: ClassVar[int] = 5
    ticket: bytes


@dataclass(frozen=True, slots=True)
class Credit:
    """From decode to prefill: decode no longer needs the frame with this mark, so its slot is
    free."""

    TYPE: ClassVar[int] = 6
    slot: int
    mark: bytes = bytes(MARK_BYTES)


@dataclass(frozen=True, slots=True)
class SlotWindow:
    """From decode to prefill, after the first verified Claim: the data with which prefill opens
    decode's window of device memory."""

    TYPE: ClassVar[int] = 7
    data: bytes


@dataclass(frozen=True, slots=True)
class Claim:
    """From prefill to decode: prefill has blocks for `num_tokens` tokens and requests blocks for as
    many."""

    TYPE: ClassVar[int] = 16
    num_tokens: int
    age_ms: int  # since prefill began; decode counts this time as prefill, not as queueing


@dataclass(frozen=True, slots=True)
class Granted:
    """From decode to prefill: the Claim's blocks are reserved. For each layer group, the first
    logical block to send."""

    TYPE: ClassVar[int] = 17
    first_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Computed:
    """From prefill to decode: the prompt's last chunk is computed; only the transfer remains."""

    TYPE: ClassVar[int] = 18
    cached_tokens: int  # from prefill's own prefix cache


@dataclass(frozen=True, slots=True)
class Ack:
    """From decode to prefill: the frames with these sequence numbers are verified and written."""

    TYPE: ClassVar[int] = 19
    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Nack:
    """From decode to prefill: a frame did not match its tag, so prefill must send it again."""

    TYPE: ClassVar[int] = 20
    sequence: int


@dataclass(frozen=True, slots=True)
class Progress:
    """From both sides, every 100 ms from Claim to the attempt's end: the liveness counter of the
    sending process's engine thread, and whether its present step computes only other requests."""

    TYPE: ClassVar[int] = 21
    liveness: int
    passed_over: bool


@dataclass(frozen=True, slots=True)
class Complete:
    """From decode to prefill: all blocks are written and verified. It acknowledges all frames."""

    TYPE: ClassVar[int] = 22


@dataclass(frozen=True, slots=True)
class Abort:
    """From either side: the attempt has ended in the process that sends this message, for
    `reason`."""

    TYPE: ClassVar[int] = 23
    reason: str


Plain = Hello | Welcome | Refused | Gone | Credit | SlotWindow
Body = Claim | Granted | Computed | Ack | Nack | Progress | Complete | Abort


@dataclass(frozen=True, slots=True)
class Signed:
    """A decoded message about an attempt; its tag is not checked until `genuine` is called."""

    ticket: bytes
    sequence: int
    body: Body
    covered: bytes
    tag: bytes

    def genuine(self, key: TagKey) -> bool:
        return key.matches(Domain.CONTROL, self.sequence, self.covered, self.tag)


Message = Plain | Signed

_ENVELOPE = struct.Struct("<16sQ")


def encode(message: Plain) -> bytes:
    """Encode a message that needs no tag as a whole record. Raises FrameError if it is too long."""
    return _record(message.TYPE, _pack(message))


def sign(body: Body, ticket: bytes, sequence: int, key: TagKey) -> bytes:
    """Encode a message about an attempt as a whole record with its tag. Raises FrameError if it is
    too long."""
    content = _ENVELOPE.pack(ticket, sequence) + _pack(body)
    covered = _record(body.TYPE, content, TAG_BYTES)
    return covered + key.tag(Domain.CONTROL, sequence, covered)


def decode(record: bytes) -> Message:
    """Decode a whole control record, including its prefix. Raises FrameError if it is malformed."""
    prefix = Prefix.unpack(record[:PREFIX_BYTES])
    if len(record) != PREFIX_BYTES + prefix.length:
        raise FrameError("the record's length does not match its prefix")
    body = record[PREFIX_BYTES:]
    codec = _CODECS.get(prefix.type)
    if codec is None:
        raise FrameError(f"unknown record type {prefix.type}")
    try:
        if prefix.type < Claim.TYPE:
            plain: Plain = codec.unpack(body)
            return plain
        if len(body) < _ENVELOPE.size + TAG_BYTES:
            raise FrameError("a signed message is too short")
        ticket, sequence = _ENVELOPE.unpack_from(body)
        content = codec.unpack(body[_ENVELOPE.size : -TAG_BYTES])
        return Signed(ticket, sequence, content, record[:-TAG_BYTES], record[-TAG_BYTES:])
    except (struct.error, ValueError) as err:
        raise FrameError(f"malformed record of type {prefix.type}: {err}") from None


def _record(kind: int, content: bytes, extra: int = 0) -> bytes:
    length = len(content) + extra
    if length > MAX_CONTROL_BYTES:
        raise FrameError(f"a message has {length} bytes; the limit is {MAX_CONTROL_BYTES}")
    return Prefix(kind, length).pack() + content


@dataclass(frozen=True, slots=True)
class _Codec:
    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes], Any]


def _pack(message: Plain | Body) -> bytes:
    return _CODECS[message.TYPE].pack(message)


def _fixed(cls: Any, layout: str, *names: str) -> _Codec:
    fields = struct.Struct("<" + layout)
    return _Codec(
        lambda m: fields.pack(*(getattr(m, name) for name in names)),
        lambda data: cls(*fields.unpack(data)),
    )


def _text(cls: Any) -> _Codec:
    def unpack(data: bytes) -> Any:
        if len(data) > MAX_REASON_BYTES:
            raise FrameError("the reason in a message is too long")
        return cls(data.decode())

    return _Codec(
        lambda m: m.reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore").encode(), unpack
    )


def _numbers(cls: Any, name: str, code: str, max_count: int) -> _Codec:
    size = struct.calcsize("<" + code)

    def unpack(data: bytes) -> Any:
        count, remainder = divmod(len(data), size)
        if remainder or count > max_count:
            raise FrameError(f"{cls.__name__} has an invalid length of {len(data)} bytes")
        return cls(struct.unpack(f"<{count}{code}", data))

    return _Codec(
        lambda m: struct.pack(f"<{len(getattr(m, name))}{code}", *getattr(m, name)), unpack
    )


_HELLO = struct.Struct("<16s16s8s?")


def _pack_hello(hello: Hello) -> bytes:
    incarnations = (hello.prefill_incarnation, hello.decode_incarnation)
    fixed = _HELLO.pack(*incarnations, hello.transport.encode(), hello.encrypted)
    return fixed + encode_identity(hello.identity) + hello.spec


def _unpack_hello(data: bytes) -> Hello:
    prefill_incarnation, decode_incarnation, transport, encrypted = _HELLO.unpack_from(data)
    identity, spec = decode_identity(data[_HELLO.size :])
    name = transport.rstrip(b"\0").decode()
    return Hello(prefill_incarnation, decode_incarnation, identity, name, spec, encrypted)


_CODECS: dict[int, _Codec] = {
    Hello.TYPE: _Codec(_pack_hello, _unpack_hello),
    Welcome.TYPE: _fixed(Welcome, f"{PROOF_BYTES}s", "proof"),
    Refused.TYPE: _text(Refused),
    Gone.TYPE: _fixed(Gone, f"{ID_BYTES}s", "ticket"),
    Credit.TYPE: _fixed(Credit, f"H{MARK_BYTES}s", "slot", "mark"),
    SlotWindow.TYPE: _Codec(lambda m: bytes(m.data), SlotWindow),
    Claim.TYPE: _fixed(Claim, "II", "num_tokens", "age_ms"),
    Granted.TYPE: _numbers(Granted, "first_blocks", "I", MAX_GROUPS),
    Computed.TYPE: _fixed(Computed, "I", "cached_tokens"),
    Ack.TYPE: _numbers(Ack, "sequences", "Q", MAX_SEQUENCES),
    Nack.TYPE: _fixed(Nack, "Q", "sequence"),
    Progress.TYPE: _fixed(Progress, "Q?", "liveness", "passed_over"),
    Complete.TYPE: _fixed(Complete, ""),
    Abort.TYPE: _text(Abort),
}


@dataclass(frozen=True, slots=True)
class HandoffCompatibility:
    """What a decode process requires of a prefill process: KV identity, KV layout and
    encryption."""

    identity: KvIdentity
    spec: KvSpec
    mixing: Mixing
    encrypted: bool

    def refusal(self, hello: Hello) -> str:
        """Return the first difference for which decode must refuse the peer; empty if the peer is
        compatible. Raises FrameError if the Hello is malformed."""
        if hello.encrypted != self.encrypted:
            local, remote = ("on" if x else "off" for x in (self.encrypted, hello.encrypted))
            return f"KV encryption {local} at decode, {remote} at prefill (--encrypt-kv)"
        difference = refusal(self.identity, hello.identity, self.mixing, SIDES)
        if difference:
            return difference.text
        try:
            peer_spec = decode_spec(hello.spec)
        except ValueError as err:
            raise FrameError(str(err)) from None
        return spec_difference(self.spec, peer_spec, SIDES)

    def other_identity(self, hello: Hello) -> bytes:
        """Return the digest of the peer's KV identity; empty if it is the same as the local
        identity."""
        digest = hello.identity.digest
        return digest if digest != self.identity.digest else b""
