"""Chooses the router for a request. Pure; the time is an argument.

Requests whose prompts begin alike go to the same router, so that the common prefix is computed
once, unless that router has more than its share of the load.
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
    """A destination that `choose` may choose for a request: a router, or an endpoint of a
    picker."""

    address: str

    def load(self, now: float) -> float:
        """Return the load at this destination: its number of open requests; a router adds a
        decaying count of the requests recently sent to it."""
        ...


C = TypeVar("C", bound=Candidate)


class Recent:
    """A decaying count of sent requests: each counts 1 when sent, and half as much after each
    HALF_LIFE_S."""

    def __init__(self) -> None:
        self._count = 0.0
        self._at = 0.0

    def add(self, now: float) -> None:
        self._count, self._at = self.count(now) + 1, now

    def count(self, now: float) -> float:
        return self._count * math.exp2((self._at - now) / HALF_LIFE_S)


def conversation(start: Start) -> bytes:
    """Return a 16-byte key of a request, equal for requests with the same model, cache salt
    (client) and first KEY_IDS prompt ids."""
    key = hashlib.blake2b(digest_size=16)
    for part in (start.model.encode(), start.cache_salt):
        key.update(len(part).to_bytes(4) + part)
    key.update(b"".join(i.to_bytes(4) for i in start.prompt_ids[:KEY_IDS]))
    return key.digest()


def choose(candidates: Sequence[C], key: bytes, now: float) -> C | None:
    """Choose a destination by rendezvous hashing with bounded loads: the one that ranks first for
    `key`, or the least loaded one if the first already has its share (SHARE times the mean load).
    None without candidates. The next in rank is not used instead, because one destination would
    then get all the excess load."""
    if not candidates:
        return None
    preferred = max(candidates, key=lambda c: weight(key, c.address))
    loads = [candidate.load(now) for candidate in candidates]
    max_load = max(1, math.ceil(SHARE * (sum(loads) + 1) / len(loads)))
    if preferred.load(now) + 1 <= max_load:
        return preferred
    return min(candidates, key=lambda c: c.load(now))
