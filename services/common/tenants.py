"""API keys of clients: identify the tenant that sends a request, and keep tenants apart from each
other.

Invariant: if API keys are configured, no other key is accepted. Keys are kept as hashes. A key file
has one key per line: NAME:sha256:HEX as `pdserve key NAME` prints it, or the key itself, whose name
is then the beginning of its hash.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pdserve.services.common.options import KeySettings
from pdserve.services.common.process import LOOK_AGAIN_S, stamp

log = logging.getLogger(__name__)

_BEARER = "bearer "
_HASHED = re.compile(r"([A-Za-z0-9._-]{1,64}):sha256:([0-9a-f]{64})")
ID_BYTES = 8
NAME_CHARS = 12  # of the hash that names an unnamed key


@dataclass(frozen=True, slots=True)
class Tenant:
    """The client, identified by its API key, that sends a request.

    name: of the key, for the log. id: identifies the tenant in fair queues. salt: part of the
    hashes in the prefix cache, so that no tenant learns what another has cached; empty: all tenants
    share the cache. The salt derives from the key itself, which no process stores, so neither a
    list of hashes nor another key reveals it.
    """

    name: str
    id: bytes
    salt: bytes

    def cache_salt(self, client_salt: bytes) -> bytes:
        """Return the prefix cache's salt for a request: the tenant's, combined with the salt that
        the client has set for the request, if any."""
        if not self.salt or not client_salt:
            return self.salt or client_salt
        return hmac.digest(self.salt, client_salt, "sha256")


EVERYBODY = Tenant("", b"", b"")


class ApiKeys:
    """The API keys that are accepted: those of the options, and those of a file, which can be
    reloaded. If neither is configured, all clients are accepted."""

    def __init__(
        self,
        keys: Iterable[str] = (),
        file: str = "",
        *,
        shared_prefix: bool = False,
    ) -> None:
        """With `shared_prefix`, all tenants share the prefix cache: salts are empty. Raises OSError
        if the file cannot be read; ValueError if a key is empty, if a line contains ':sha256:' but
        is malformed, or if the file contains no key."""
        self._shared_prefix = shared_prefix
        self._file = file
        key_texts = tuple(keys)
        if not all(key_texts):
            raise ValueError("an API key must not be empty")
        self._configured = [_parse_key(key) for key in key_texts]
        self._from_file = self._read()

    @property
    def required(self) -> bool:
        return bool(self._configured or self._file)

    def tenant(self, authorization: str) -> Tenant | None:
        """Return the tenant whose key is in an Authorization header ("Bearer KEY"); None if the key
        is not accepted. Without keys, every client is the tenant EVERYBODY."""
        if not self.required:
            return EVERYBODY
        header = authorization.strip()
        key = header[len(_BEARER) :].strip() if header[: len(_BEARER)].lower() == _BEARER else ""
        digest = _digest(key)
        matching_name = None
        for known_digest, name in (*self._configured, *self._from_file):
            if hmac.compare_digest(digest, known_digest):
                matching_name = name
        if matching_name is None:
            return None
        salt = b"" if self._shared_prefix else _derived(key, b"cache salt")
        return Tenant(matching_name, _derived(key, b"tenant")[:ID_BYTES], salt)

    def overlap(self, other: "ApiKeys") -> bool:
        """Return whether a key is accepted here and by `other`."""
        digests, others = (
            {digest for digest, _ in (*keys._configured, *keys._from_file)}
            for keys in (self, other)
        )
        return not digests.isdisjoint(others)

    def has_name(self, name: str) -> bool:
        """Return whether an accepted key has this name; without keys, whether it is the name of
        EVERYBODY."""
        if not self.required:
            return name == EVERYBODY.name
        return any(name == known_name for _, known_name in (*self._configured, *self._from_file))

    def reload(self) -> None:
        """Read the key file again. If it cannot be used, log why and keep the previous keys."""
        try:
            self._from_file = self._read()
        except (OSError, ValueError) as error:
            log.error("cannot reload the API keys; the previous ones stay in use: %s", error)
        else:
            log.info("%s: %d API keys loaded", self._file, len(self._from_file))

    async def watch(self) -> None:
        """Reload the key file whenever it changes or SIGHUP arrives; runs until cancelled. Without
        a file, SIGHUP is ignored."""
        changed = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, changed.set)
        if not self._file:
            await asyncio.Event().wait()
        last_stamp = stamp(self._file)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await changed.wait()
            if changed.is_set() or stamp(self._file) != last_stamp:
                changed.clear()
                last_stamp = stamp(self._file)
                self.reload()

    def _read(self) -> list[tuple[bytes, str]]:
        if not self._file:
            return []
        lines = (line.strip() for line in Path(self._file).read_text("utf-8").splitlines())
        entries = [_parse_key(line) for line in lines if line and line[0] != "#"]
        if not entries:
            raise ValueError(f"{self._file} has no API key")
        return entries


def make_keys(settings: KeySettings) -> ApiKeys:
    """Make the ApiKeys that the options configure. Raises OSError or ValueError like ApiKeys."""
    return ApiKeys(settings.api_keys, settings.api_key_file, shared_prefix=settings.shared_prefix)


def hashed(name: str, key: str) -> str:
    """Return the line NAME:sha256:HEX that represents a key in a key file. Raises ValueError if the
    name has characters that are not allowed."""
    line = f"{name}:sha256:{_digest(key).hex()}"
    if not _HASHED.fullmatch(line):
        raise ValueError(
            f"a key's name must have 1 to 64 letters, digits, '.', '_' or '-', not {name!r:.80}"
        )
    return line


def _parse_key(text: str) -> tuple[bytes, str]:
    """Return the hash and the name of a key, which `text` contains as NAME:sha256:HEX or in plain
    text. Raises ValueError if it contains ':sha256:' but is malformed."""
    if match := _HASHED.fullmatch(text):
        return bytes.fromhex(match[2]), match[1]
    if ":sha256:" in text:
        raise ValueError(
            "an API key with ':sha256:' must be NAME:sha256:HEX, as `pdserve key` prints it"
        )
    digest = _digest(text)
    return digest, digest.hex()[:NAME_CHARS]


def _derived(key: str, purpose: bytes) -> bytes:
    return hmac.digest(_bytes(key), b"pdserve " + purpose, "sha256")


def _digest(key: str) -> bytes:
    return hashlib.sha256(_bytes(key)).digest()


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")
