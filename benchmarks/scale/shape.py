"""The measured system, as seen by one of its routers, and its prompts.

A router of ten has a tenth of the streams, and all workers join it. A worker's reports cover all
its streams, including those of the nine other routers, so they are as many and as large as there.
Prompts have shared beginnings, each of which some workers have in their cache.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from random import Random

from pdserve.engine.kv import cache_seed, chain_hashes

BLOCK = 16  # tokens of a KV block
MODEL = "scale"
MARKS = 64  # the token at position p is p % MARKS
BEGINNINGS = 200
HOLDERS = 10  # one worker in this many has a beginning
IDENTITY = b"scale".ljust(16)  # digest of the KV identity of all workers
VOCAB = 256


@dataclass(frozen=True)
class Shape:
    """Sizes; streams and gateways are those of the measured router."""

    workers: int = 100  # a tenth of them prefill
    streams: int = 2_000
    gateways: int = 10
    hashes: int = 20_000  # of a worker's prefix cache
    routers: int = 10
    tokens_s: float = 10.0  # of a stream
    answer_len: int = 256
    prompt_len: int = 512
    shared_len: int = 256  # of a prompt: its beginning, which some workers have cached

    @property
    def prefills(self) -> int:
        return self.workers // 10

    @property
    def decodes(self) -> int:
        return self.workers - self.prefills

    @property
    def starts_s(self) -> float:
        """Requests per second that begin at this router."""
        return self.streams * self.tokens_s / self.answer_len

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Shape":
        return cls(**json.loads(text))


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
