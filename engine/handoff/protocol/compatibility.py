"""What prefill and decode must agree on before the first Claim; decode compares it. Pure."""

from dataclasses import dataclass

from pdserve.engine.handoff.protocol.frames import FrameError
from pdserve.engine.handoff.protocol.messages import Hello
from pdserve.engine.kv.codec import decode_spec
from pdserve.engine.kv.identity import KvIdentity, Mixing, refusal
from pdserve.engine.kv.spec import KvSpec, spec_difference


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
            here, there = ("encrypted" if x else "not" for x in (self.encrypted, hello.encrypted))
            return f"KV encryption: {here} here, {there} there (--encrypt-kv)"
        other = refusal(self.identity, hello.identity, self.mixing)
        if other:
            return other.text
        try:
            theirs = decode_spec(hello.spec)
        except ValueError as err:
            raise FrameError(str(err)) from None
        return spec_difference(self.spec, theirs)

    def other_identity(self, hello: Hello) -> bytes:
        """Return the digest of the peer's KV identity; empty if it equals the local one."""
        other = hello.identity.digest
        return other if other != self.identity.digest else b""
