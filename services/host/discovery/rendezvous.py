"""Rendezvous hashing: everybody who knows the same names has the same order of them. Pure.

Whoever comes or goes leaves the order of the others as it is, so with the first K of N taken it
moves K of N keys (Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998).
"""

import hashlib
from collections.abc import Callable, Iterable


def weight(key: bytes, address: str) -> bytes:
    """The address with the highest one comes first for the key, which has at most 64 bytes."""
    return hashlib.blake2b(address.encode(), digest_size=8, key=key).digest()


def rendezvous_order(key: bytes, addresses: Iterable[str]) -> list[str]:
    """The addresses, each once, the first for the key at the front."""
    return sorted(set(addresses), key=lambda a: (weight(key, a), a), reverse=True)


def first_that_count(order: Iterable[str], num: int, counts: Callable[[str], bool]) -> list[str]:
    """The shortest beginning of the order in which `num` count; all of it if there are fewer."""
    found = []
    for address in order:
        if num <= 0:
            break
        found.append(address)
        num -= counts(address)
    return found
