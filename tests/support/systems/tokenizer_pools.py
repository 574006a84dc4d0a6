"""A tokenizer pool whose processes end with it, for tests, and these processes."""

import os
from collections.abc import Mapping

import psutil

from pdserve.text.tokenizer import TextModelInfo
from pdserve.text.workers import LoadedTokenizer, TokenizerPool, WorkerLimits
from systems.eventually import LIMIT_S

LIMITS = WorkerLimits(
    load_s=LIMIT_S,
    load_bytes=1 << 30,
    render_s=0.5,
    prompt_s=LIMIT_S,
    prompt_bytes=64 << 20,
    late_s=LIMIT_S,
    grammar_s=0.5,
)


class Pool(TokenizerPool):
    """A pool that ends what it has loaded."""

    def __init__(
        self, limits: WorkerLimits = LIMITS, workers: int = 2, wait_s: float = LIMIT_S
    ) -> None:
        super().__init__(limits, workers, wait_s=wait_s)
        self.loaded: list[LoadedTokenizer] = []

    async def load(self, model_info: TextModelInfo, files: Mapping[str, bytes]) -> LoadedTokenizer:
        text = await super().load(model_info, files)
        self.loaded.append(text)
        return text

    async def close(self) -> None:
        for text in self.loaded:
            await text.workers.close()
        await super().close()


def fork_servers() -> list[psutil.Process]:
    """Return the fork servers of models, and spare ones. Each leads a session; processes that other
    tests have left here do not.
    """
    return [p for p in psutil.Process().children() if os.getsid(p.pid) == p.pid]


def workers() -> list[psutil.Process]:
    """Return the tokenizer workers of the only model."""
    return [w for p in fork_servers() for w in p.children()]
