"""Prompts with shared beginnings, and the workers that have each beginning in their cache."""

from collections.abc import Iterator
from functools import cache
from random import Random

from scale.shape import BLOCK, Shape

from pdserve.engine.kv import cache_seed, chain_hashes

BEGINNINGS = 200
HOLDERS = 10  # one worker in this many has a beginning
IDENTITY = b"scale".ljust(16)  # digest of the KV identity of all workers
VOCAB = 256


@cache
def beginning(number: int, length: int) -> tuple[int, ...]:
    return tuple(Random(number).choices(range(VOCAB), k=length))


def prompts(shape: Shape, rng: Random) -> Iterator[list[int]]:
    """An endless series of prompts; each is a beginning with a unique end."""
    while True:
        head = beginning(rng.randrange(BEGINNINGS), shape.shared_len)
        tail = rng.choices(range(VOCAB), k=shape.prompt_len - shape.shared_len)
        yield [*head, *tail]


def held_by(worker: int, shape: Shape) -> list[bytes]:
    """Chain hashes of the beginnings that a worker has."""
    seed = cache_seed(IDENTITY, b"")
    found: list[bytes] = []
    for number in range(worker % HOLDERS, BEGINNINGS, HOLDERS):
        found += chain_hashes(beginning(number, shape.shared_len), BLOCK, seed)
    return found
