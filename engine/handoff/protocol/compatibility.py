"""What prefill and decode must agree on before the first Claim; decode compares it. Pure."""

from dataclasses import dataclass

from pdserve.engine.handoff.protocol.frames import FrameError
from pdserve.engine.handoff.protocol.messages import Hello
from pdserve.engine.kv.codec import decode_spec
from pdserve.engine.kv.identity import KvIdentity, Mixing, refusal
from pdserve.engine.kv.spec import KvSpec, spec_difference

SIDES = ("at decode", "at prefill")


@dataclass(frozen=True, slots=True)
class HandoffCompatibility:
    """What one process requires of its peers."""

    identity: KvIdentity
    spec: KvSpec
    mixing: Mixing
    encrypted: bool

    def refusal(self, hello: Hello) -> str:
        """Return what differs and is not admitted; empty if the peer is compatible. Raises
        FrameError."""
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
        """Return the digest of the peer's KV identity; empty if it equals the local one."""
        digest = hello.identity.digest
        return digest if digest != self.identity.digest else b""
