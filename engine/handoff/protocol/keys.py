"""Tags of frames and control messages: keys derived from a ticket's secret, one AES-GMAC a record.

The secret never travels on the data connection. Each direction has its own key, and a nonce is
(domain, sequence): a sequence number is used once per ticket, direction and domain. A frame that is
sent again is a new record with a new number. Encrypted payloads have a domain of their own, so even
processes that disagree about encryption never use one nonce for both.
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
    """One attempt between one prefill boot and one decode boot. `secret` stays off the wire."""

    id: bytes
    secret: bytes
    attempt: bytes
    prefill_boot: bytes
    decode_boot: bytes


class TagKey:
    """Makes and checks the tags of one direction of one ticket. Thread-safe, since it has no
    state."""

    def __init__(self, key: bytes) -> None:
        self._gcm = AESGCM(key)
        self._key = key
        self._copy_key = hmac.digest(key, b"pdserve copy hash", "sha256")

    def tag(self, domain: Domain, sequence: int, *parts: bytes | memoryview) -> bytes:
        """GMAC (NIST SP 800-38D) of the parts in order: AES-GCM without plaintext, where the parts
        are the associated data."""
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
        """A payload encrypted by AES-GCM: as many bytes as `plain`, then the tag."""
        return memoryview(self._gcm.encrypt(_nonce(Domain.SEALED, sequence), plain, None))

    def unseal(self, sequence: int, sealed: bytes | memoryview, tag: bytes) -> memoryview | None:
        """The payload; None if it is not what this key has sealed."""
        nonce = _nonce(Domain.SEALED, sequence)
        try:
            return memoryview(self._gcm.decrypt(nonce, b"".join((sealed, tag)), None))
        except InvalidTag:
            return None

    def copy_key(self, sequence: int) -> bytes:
        """The key of one frame's hash on a device (kernels/copy_hash.py): 32 bytes, used once."""
        return hmac.digest(self._copy_key, sequence.to_bytes(8, "little"), "sha256")


@dataclass(frozen=True, slots=True)
class TicketKeys:
    """Both directions of one ticket."""

    to_decode: TagKey
    to_prefill: TagKey


def verified_payload(
    key: TagKey, sequence: int, payload: memoryview, tag: bytes, sealed: bool
) -> memoryview | None:
    """The plain payload, or None if it is not what the key's owner tagged or sealed."""
    if sealed:
        return key.unseal(sequence, payload, tag)
    return payload if key.matches(Domain.PAYLOAD, sequence, payload, tag) else None


def derive_keys(ticket: Ticket, spec_digest: bytes, identity: bytes) -> TicketKeys:
    """Derives the keys by HKDF-SHA256 (RFC 5869) from everything that both sides must agree on.

    Another attempt, boot id, KV layout or KV identity (decode's digest) gives other keys, so frames
    made with them fail their check. The ticket's id is the salt.
    """
    parts = (ticket.attempt, ticket.prefill_boot, ticket.decode_boot, spec_digest, identity)
    info = b"pdserve hand-off 1" + b"".join(len(p).to_bytes(2, "little") + p for p in parts)
    key = HKDF(algorithm=SHA256(), length=64, salt=ticket.id, info=info).derive(ticket.secret)
    return TicketKeys(TagKey(key[:32]), TagKey(key[32:]))


def _nonce(domain: Domain, sequence: int) -> bytes:
    return int(domain).to_bytes(4, "little") + sequence.to_bytes(8, "little")
