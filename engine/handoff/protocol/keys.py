"""The tags that authenticate frames and control messages.

Each frame header and each control message about an attempt has an AES-GMAC, and so has a plain
payload from host memory; an encrypted payload has the tag of AES-GCM. The keys are derived from the
secret of a ticket.

The secret never travels on the data connection. Each direction has a separate key, and a nonce is
(domain, sequence): a sequence number is used once per ticket, direction and domain. A resent frame
is a new record with a new number. Encrypted payloads have a separate domain, so no nonce is used
both to tag and to encrypt, even if the two processes disagree about encryption.
"""

import hmac
from dataclasses import dataclass
from enum import IntEnum

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SECRET_BYTES = 32


class Domain(IntEnum):
    PAYLOAD = 1
    HEADER = 2
    CONTROL = 3
    SEALED = 4  # an encrypted payload


@dataclass(frozen=True, slots=True)
class Ticket:
    """The id and secret of one hand-off attempt, and the two processes that take part in it.
    `secret` is never sent on the data connection."""

    id: bytes
    secret: bytes
    attempt: bytes
    prefill_incarnation: bytes
    decode_incarnation: bytes


class TagKey:
    """Makes and checks the tags of one direction of one ticket. Stateless, hence thread-safe."""

    def __init__(self, key: bytes) -> None:
        self._gcm = AESGCM(key)
        self._key = key
        self._copy_key = hmac.digest(key, b"pdserve copy hash", "sha256")

    def tag(self, domain: Domain, sequence: int, *parts: bytes | memoryview) -> bytes:
        """Return the GMAC (NIST SP 800-38D) of the parts in order: AES-GCM without plaintext, with
        the parts as associated data."""
        if len(parts) == 1:
            return self._gcm.encrypt(_nonce(domain, sequence), b"", parts[0])
        mac = Cipher(AES(self._key), GCM(_nonce(domain, sequence))).encryptor()
        for part in parts:
            mac.authenticate_additional_data(part)
        mac.finalize()
        return mac.tag

    def matches(self, domain: Domain, sequence: int, data: bytes | memoryview, tag: bytes) -> bool:
        return hmac.compare_digest(self.tag(domain, sequence, data), tag)

    def seal(self, sequence: int, plain: bytes | memoryview) -> memoryview:
        """Encrypt a payload by AES-GCM; return as many bytes as `plain`, then the tag."""
        return memoryview(self._gcm.encrypt(_nonce(Domain.SEALED, sequence), plain, None))

    def unseal(self, sequence: int, sealed: bytes | memoryview, tag: bytes) -> memoryview | None:
        """Decrypt a payload; return None if it was not encrypted with this key or was changed."""
        nonce = _nonce(Domain.SEALED, sequence)
        try:
            return memoryview(self._gcm.decrypt(nonce, b"".join((sealed, tag)), None))
        except InvalidTag:
            return None

    def copy_key(self, sequence: int) -> bytes:
        """Derive the 32-byte key with which a device hashes the payload of the frame `sequence`
        (kernels/copy_hash.py)."""
        return hmac.digest(self._copy_key, sequence.to_bytes(8, "little"), "sha256")


@dataclass(frozen=True, slots=True)
class TicketKeys:
    """The keys of both directions of one ticket, to decode and to prefill."""

    to_decode: TagKey
    to_prefill: TagKey


def verified_payload(
    key: TagKey, sequence: int, payload: memoryview, tag: bytes, sealed: bool
) -> memoryview | None:
    """Check a payload's tag, or decrypt the payload if it is `sealed`, and return the plain bytes.
    None if the payload was not made with this key or was changed."""
    if sealed:
        return key.unseal(sequence, payload, tag)
    return payload if key.matches(Domain.PAYLOAD, sequence, payload, tag) else None


def derive_keys(ticket: Ticket, spec_digest: bytes, identity: bytes) -> TicketKeys:
    """Derive a ticket's keys by HKDF-SHA256 (RFC 5869) from everything that both sides must agree
    on.

    The ticket's id is the salt. Another attempt, incarnation, KV layout or KV identity (decode's
    digest) gives other keys, so frames and messages signed with them fail verification.
    """
    parts = (
        ticket.attempt,
        ticket.prefill_incarnation,
        ticket.decode_incarnation,
        spec_digest,
        identity,
    )
    info = b"pdserve hand-off 1" + b"".join(len(p).to_bytes(2, "little") + p for p in parts)
    key = HKDF(algorithm=SHA256(), length=64, salt=ticket.id, info=info).derive(ticket.secret)
    return TicketKeys(TagKey(key[:32]), TagKey(key[32:]))


def _nonce(domain: Domain, sequence: int) -> bytes:
    return int(domain).to_bytes(4, "little") + sequence.to_bytes(8, "little")
