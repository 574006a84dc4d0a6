"""Records of a data connection: frames and control messages, mutated valid ones, and noise."""

import os
from pathlib import Path
from random import Random

from fuzz.mutate import mutate
from pdserve.engine.handoff.protocol import (
    FrameError,
    FrameHeader,
    Prefix,
    Ticket,
    derive_keys,
    messages,
)
from pdserve.engine.kv import (
    KvIdentity,
    KvSpec,
    LayerGroup,
    decode_identity,
    decode_spec,
    encode_spec,
    spec_digest,
)

SPEC = KvSpec(32, (LayerGroup((0, 1), "full", 0, 3, 64, "float32", 0, 3),))
BODIES = (
    messages.Claim(1, 2),
    messages.Granted((1, 2, 3)),
    messages.Computed(7),
    messages.Ack((1, 2**63)),
    messages.Nack(3),
    messages.Progress(4, True),
    messages.Complete(),
    messages.Abort("why"),
)


class Fuzzed:
    def __init__(self, folder: Path) -> None:
        incarnations = os.urandom(16), os.urandom(16)
        ticket = Ticket(b"t" * 16, b"s" * 32, b"a" * 16, *incarnations)
        self._keys = derive_keys(ticket, spec_digest(SPEC), b"id")
        identity = KvIdentity(b"digest", "w", "q", "c", "t", "bfloat16", "n")
        hello = messages.Hello(*incarnations, identity, "tcp", encode_spec(SPEC), False)
        plain = (
            hello,
            messages.Welcome(incarnations[0]),
            messages.Refused("no"),
            messages.Credit(1),
        )
        signed = (messages.sign(body, b"t" * 16, 5, self._keys.to_decode) for body in BODIES)
        header = FrameHeader(
            ticket=b"t" * 16,
            sequence=5,
            slot=1,
            group=0,
            layers=range(2),
            tokens=range(64),
            heads=range(3),
            payload_bytes=1000,
            payload_tag=b"x" * 16,
        )
        self._records = [*map(messages.encode, plain), *signed, header.pack() + bytes(16)]
        self._others = [encode_spec(SPEC), rawbytes(identity)]

    def case(self, rng: Random) -> str:
        data = mutate(rng, rng.choice([*self._records, *self._others]))
        outcomes = set()
        for decoder in (messages.decode, FrameHeader.unpack, Prefix.unpack):
            try:
                found = decoder(data)
            except FrameError:
                continue
            outcomes.add("read")
            if isinstance(found, messages.Signed) and data not in self._records:
                assert not found.genuine(self._keys.to_decode), "a changed record is accepted"
        for decode in (decode_spec, decode_identity):
            try:
                decode(data)
            except ValueError:
                continue
            outcomes.add("read")
        return "read" if outcomes else "refused"


def rawbytes(identity: KvIdentity) -> bytes:
    from pdserve.engine.kv import encode_identity

    return encode_identity(identity)
