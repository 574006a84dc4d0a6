"""A text pool whose processes end with it, for tests, and these processes."""

import os
from collections.abc import Mapping

import psutil

from pdserve.text.processes import LoadedText, TextLimits, TextPool
from pdserve.text.tokenizer import TextCard
from systems.eventually import LIMIT_S

LIMITS = TextLimits(
    load_s=LIMIT_S,
    load_bytes=1 << 30,
    render_s=0.5,
    prompt_s=LIMIT_S,
    prompt_bytes=64 << 20,
    late_s=LIMIT_S,
    grammar_s=0.5,
)


class Pool(TextPool):
    """A pool that ends what it has loaded."""

    def __init__(
        self, limits: TextLimits = LIMITS, workers: int = 2, wait_s: float = LIMIT_S
    ) -> None:
        super().__init__(limits, workers, wait_s=wait_s)
        self.loaded: list[LoadedText] = []

    async def load(self, card: TextCard, files: Mapping[str, bytes]) -> LoadedText:
        text = await super().load(card, files)
        self.loaded.append(text)
        return text

    async def close(self) -> None:
        for text in self.loaded:
            await text.processes.close()
        await super().close()


def text_processes() -> list[psutil.Process]:
    """Return processes of models, and spare ones. Each leads a session; those that other tests
    have left here do not.
    """
    return [p for p in psutil.Process().children() if os.getsid(p.pid) == p.pid]


def workers() -> list[psutil.Process]:
    """Return the processes of the only model."""
    return [w for p in text_processes() for w in p.children()]
