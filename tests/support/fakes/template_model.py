"""A router whose model has any tokenizer and chat template, and generates what a test specifies."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import tokenizers

from fakes.router import Event, FakeRouter, finished, placed, served, tokens, with_tokenizer
from pdserve.protos import common_pb2 as pb

CONTEXT_LEN = 1 << 15


class TemplateModel(FakeRouter):
    """A model whose answers come from `says` at that time, token by token. `eos`, `bos`: texts of
    tokens.
    """

    def __init__(self, tokenizer: bytes, template: str, eos: Sequence[str], bos: str = "") -> None:
        card, blobs = served(context_len=CONTEXT_LEN, template=template)
        with_tokenizer(card, blobs, tokenizer, eos, bos)
        super().__init__(self._say, [card], blobs)
        self.words = tokenizers.Tokenizer.from_buffer(tokenizer)
        self.says: Callable[[], str] = str

    async def _say(self, router: FakeRouter, start: pb.Start) -> AsyncGenerator[Event, None]:
        yield placed(start)
        ids = [*self.encode(self.says()), self.cards[0].eos_ids[0]]
        for position, token in enumerate(ids):
            finish = pb.STOP if position + 1 == len(ids) else pb.FINISH_REASON_UNSPECIFIED
            yield tokens(start, [token], position, 0, finish)
        await asyncio.sleep(0)
        yield finished(start)
