"""The measured system, as seen by one of its routers.

A router of ten has a tenth of the streams, and all workers join it. A worker's reports cover all
its streams, including those of the nine other routers, so they are as many and as large as there.
"""

import json
from dataclasses import asdict, dataclass

BLOCK = 16  # tokens of a KV block
MODEL = "scale"
MARKS = 64  # the token at position p is p % MARKS


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
