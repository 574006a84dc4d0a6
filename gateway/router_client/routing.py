"""Chooses the router for a request. Pure; time is an argument.

Requests with the same beginning go to the same router, which then computes their prefix once, as
long as it has no more than its share of the load.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

from pdserve.protos.common_pb2 import Start
from pdserve.services.common.discovery import weight

KEY_IDS = 64  # length of the prompt's beginning
SHARE = 1.1  # largest load of a router, relative to the mean
HALF_LIFE_S = 10.0  # after which a sent request counts half


class Candidate(Protocol):
    """A router, or an endpoint of a picker, that a request may go to."""

    address: str

    def load(self, now: float) -> float:
        """The number of open requests there; a router adds a decaying count of all
        requests sent to it."""
        ...


C = TypeVar("C", bound=Candidate)


class Recent:
    """A decaying count of sent requests; each counts half after HALF_LIFE_S."""

    def __init__(self) -> None:
        self._count = 0.0
        self._at = 0.0

    def add(self, now: float) -> None:
        self._count, self._at = self.count(now) + 1, now

    def count(self, now: float) -> float:
        return self._count * math.exp2((self._at - now) / HALF_LIFE_S)


def conversation(start: Start) -> bytes:
    """A key that is equal for requests of one client to one model whose prompts begin alike."""
    key = hashlib.blake2b(digest_size=16)
    for part in (start.model.encode(), start.cache_salt):
        key.update(len(part).to_bytes(4) + part)
    key.update(b"".join(i.to_bytes(4) for i in start.prompt_ids[:KEY_IDS]))
    return key.digest()


def choose(candidates: Sequence[C], key: bytes, now: float) -> C | None:
    """Rendezvous hashing with bounded loads: the conversation's own router, or the least loaded one
    if that already has its share. Choosing the next router in the conversation's order instead
    would leave all load below the share to one router."""
    if not candidates:
        return None
    preferred = max(candidates, key=lambda c: weight(key, c.address))
    loads = [candidate.load(now) for candidate in candidates]
    max_load = max(1, math.ceil(SHARE * (sum(loads) + 1) / len(loads)))
    if preferred.load(now) + 1 <= max_load:
        return preferred
    return min(candidates, key=lambda c: c.load(now))
