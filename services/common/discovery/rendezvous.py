"""Rendezvous hashing: all processes that know the same names order them identically. Pure.

Adding or removing a name keeps the order of the others, so if the first K of N are taken, K of N
keys move (Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998).
"""

import hashlib
from collections.abc import Callable, Iterable


def weight(key: bytes, address: str) -> bytes:
    """The weight of an address for a key of at most 64 bytes; the highest weight comes first."""
    return hashlib.blake2b(address.encode(), digest_size=8, key=key).digest()


def rendezvous_order(key: bytes, addresses: Iterable[str]) -> list[str]:
    """The distinct addresses, sorted by descending weight for the key."""
    return sorted(set(addresses), key=lambda a: (weight(key, a), a), reverse=True)


def first_that_count(order: Iterable[str], num: int, counts: Callable[[str], bool]) -> list[str]:
    """The shortest prefix of the order in which `num` addresses count; the whole order if fewer
    do."""
    prefix = []
    for address in order:
        if num <= 0:
            break
        prefix.append(address)
        num -= counts(address)
    return prefix
