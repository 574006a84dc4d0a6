"""The identity of the computation that produced a KV cache, in named parts, and the check whether
two processes are equal enough to share KV. Pure.

Two processes share KV only if their `digest`s are equal: it hashes everything that a key or value
depends on besides the token ids. The other parts serve to name the difference in messages. The
tokenizer is not part of the digest, but must be equal too, because another tokenizer gives the same
ids another text. `Mixing` lists differences that an operator accepts nevertheless. The encoding of
an identity is its parts in order, each after its length.
"""

import struct
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

SHORT = 12  # hex digits of a digest in a message
SIDES = ("on this side", "on the peer")  # names of the two processes in a message


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """Identity of the computation in one process. A part that is not known is empty and is not
    compared; the digest always is."""

    digest: bytes  # 16 bytes
    weights: str = ""  # hex digest of the tensors as stored
    quantization: str = ""  # the label of their format, for messages
    configuration: str = ""  # hex digest of what a config.json says: rope, norms, windows
    tokenizer: str = ""  # hex digest of tokenizer.json
    kv_dtype: str = ""
    numerics: str = ""  # kernel set and version, ISA class, dtypes

    @classmethod
    def of(cls, message: Any) -> "KvIdentity":
        """Make a KvIdentity from an object that has the same fields, such as a protobuf message."""
        return cls(**{name: getattr(message, name) for name in NAMES})

    def parts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in NAMES}


NAMES = tuple(field.name for field in fields(KvIdentity))
UNKNOWN = KvIdentity(b"")
_HASHED = ("weights", "configuration", "kv_dtype", "numerics")
_COMPARED = {
    "weights": "weights",
    "configuration": "model configuration",
    "tokenizer": "tokenizer",
    "kv_dtype": "KV dtype",
    "numerics": "numerics id",
}


@dataclass(frozen=True, slots=True)
class Mixing:
    """The differences of KV identities that the operator accepts between processes that share KV:
    another format of the weights, or other numerics. A response computed across such a difference
    is marked inexact."""

    weights: bool = False  # another format of the same model; not verified to be the same
    numerics: bool = False  # another numerics id of the same weights


NO_MIXING = Mixing()


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference because of which two processes cannot share KV. `what`: short label for metrics;
    `text`: description for messages."""

    what: str
    text: str


def differences(
    local: KvIdentity, remote: KvIdentity, sides: tuple[str, str] = SIDES
) -> list[Difference]:
    """Return all known differences between two KV identities; empty if both processes compute the
    same KV. `sides`: what to call the two processes in the descriptions."""
    result = []
    local_side, remote_side = sides
    for part, name in _COMPARED.items():
        local_value, remote_value = getattr(local, part), getattr(remote, part)
        if local_value and remote_value and local_value != remote_value:
            x, y = _part_text(local, part), _part_text(remote, part)
            text = f"{name} {x} {local_side}, {y} {remote_side}"
            result.append(Difference(part, text))
    complete = all(getattr(identity, part) for identity in (local, remote) for part in _HASHED)
    if local.digest != remote.digest and not (result and complete):
        x, y = local.digest.hex()[:SHORT], remote.digest.hex()[:SHORT]
        result.append(Difference("identity", f"KV identity {x} {local_side}, {y} {remote_side}"))
    return result


def refusal(
    local: KvIdentity, remote: KvIdentity, mixing: Mixing, sides: tuple[str, str] = SIDES
) -> Difference | None:
    """Return the first difference between two KV identities that `mixing` does not accept, because
    of which they must not share KV; None if they may. `sides`: what to call the two processes."""
    return None if local is remote or local == remote else _refusal(local, remote, mixing, sides)


@lru_cache(maxsize=1024)
def _refusal(
    local: KvIdentity, remote: KvIdentity, mixing: Mixing, sides: tuple[str, str]
) -> Difference | None:
    admitted = {"weights": mixing.weights, "numerics": mixing.numerics}
    return next((d for d in differences(local, remote, sides) if not admitted.get(d.what)), None)


def _part_text(identity: KvIdentity, part: str) -> str:
    value: str = getattr(identity, part)
    if part in ("kv_dtype", "numerics"):
        return value
    label = f" ({identity.quantization})" if part == "weights" and identity.quantization else ""
    return value[:SHORT] + label


_PART = struct.Struct("<H")  # length of one part of an encoded identity


def encode_identity(identity: KvIdentity) -> bytes:
    """Encode a KV identity as bytes that `decode_identity` reads."""
    parts = [v if isinstance(v, bytes) else v.encode() for v in identity.parts().values()]
    return b"".join(_PART.pack(len(part)) + part for part in parts)


def decode_identity(data: bytes) -> tuple[KvIdentity, bytes]:
    """Decode the KV identity at the start of `data`; return it and the remaining bytes. Raises
    ValueError if the identity is truncated or malformed."""
    offset = 0
    parts: list[bytes] = []
    for _ in NAMES:
        try:
            (size,) = _PART.unpack_from(data, offset)
        except struct.error as err:
            raise ValueError(f"the KV identity is malformed: {err}") from None
        offset += _PART.size
        parts.append(data[offset : offset + size])
        offset += size
    if offset > len(data):
        raise ValueError("the KV identity is truncated")
    digest, *texts = parts
    return KvIdentity(digest, *(text.decode() for text in texts)), data[offset:]
