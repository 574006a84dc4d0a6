"""Identity of the process that computed a KV cache, in named parts, and its accepted differences.

Pure. KV is shared exactly only where `digest` is equal: it hashes everything that a key or value
depends on besides the token ids. The parts say what differs where it is not. The tokenizer is not
part of the digest, but it must be equal too, because another tokenizer gives the ids another text.
"""

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

SHORT = 12  # hex digits of a digest in a message


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """The identity of one process. Unknown parts are empty; then only the digest is compared."""

    digest: bytes  # 16 bytes
    weights: str = ""  # hex digest of the tensors as stored
    quantization: str = ""  # the label of their format, for messages
    configuration: str = ""  # hex digest of what a config.json says: rope, norms, windows
    tokenizer: str = ""  # hex digest of tokenizer.json
    kv_dtype: str = ""
    numerics: str = ""  # kernel set and version, ISA class, dtypes

    @classmethod
    def of(cls, message: Any) -> "KvIdentity":
        """Build an identity from an object with the same fields, such as a protobuf message."""
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
    """Which differences are accepted; an answer that needed one is marked inexact."""

    weights: bool = False  # another format of the same model; not verified to be the same
    numerics: bool = False  # another numerics id of the same weights


NO_MIXING = Mixing()


@dataclass(frozen=True, slots=True)
class Difference:
    """Why two processes are not compatible. `what` is a short label for counters."""

    what: str
    text: str


def differences(here: KvIdentity, there: KvIdentity) -> list[Difference]:
    """Return all known differences; empty if both processes compute the same KV."""
    found = []
    for what, name in _COMPARED.items():
        ours, theirs = getattr(here, what), getattr(there, what)
        if ours and theirs and ours != theirs:
            text = f"{name} {_word(here, what)} here, {_word(there, what)} there"
            found.append(Difference(what, text))
    complete = all(getattr(one, what) for one in (here, there) for what in _HASHED)
    if here.digest != there.digest and not (found and complete):
        x, y = here.digest.hex()[:SHORT], there.digest.hex()[:SHORT]
        found.append(Difference("identity", f"KV identity {x} here, {y} there"))
    return found


def refusal(here: KvIdentity, there: KvIdentity, mixing: Mixing) -> Difference | None:
    """Return the first difference that is not accepted."""
    return None if here is there or here == there else _refusal(here, there, mixing)


@lru_cache(maxsize=1024)
def _refusal(here: KvIdentity, there: KvIdentity, mixing: Mixing) -> Difference | None:
    admitted = {"weights": mixing.weights, "numerics": mixing.numerics}
    return next((d for d in differences(here, there) if not admitted.get(d.what)), None)


def _word(identity: KvIdentity, what: str) -> str:
    value: str = getattr(identity, what)
    if what in ("kv_dtype", "numerics"):
        return value
    label = f" ({identity.quantization})" if what == "weights" and identity.quantization else ""
    return value[:SHORT] + label
