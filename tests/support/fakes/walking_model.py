"""A router whose model writes random answers that its grammar allows, as under a worker's mask."""

import asyncio
import random
from collections.abc import AsyncGenerator, Collection, Sequence

import tokenizers
from oracles.grammar_walks import Walk, Words
from tokenizers import AddedToken

from fakes.router import (
    Event,
    FakeRouter,
    finished,
    placed,
    served,
    tokenizer_json,
    tokens,
    with_tokenizer,
)
from pdserve.protos import common_pb2 as pb

CONTEXT_LEN = 1 << 15


def with_added_tokens(texts: Sequence[str]) -> bytes:
    """Return the fake router's tokenizer with further tokens that are not flagged special, like
    <tool_call> and <think> of Qwen 3.
    """
    words = tokenizers.Tokenizer.from_buffer(tokenizer_json())
    words.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])
    return words.to_str().encode()


class WalkingModel(FakeRouter):
    """A model with any tokenizer and template. The seed of a request determines its answer; where
    its grammar begins after some ids, reasoning comes first. `preferred` are texts that it writes
    more often than others.
    """

    def __init__(
        self,
        tokenizer: bytes,
        template: str,
        eos: Sequence[str],
        preferred: Collection[str] = (),
        thought: str = "<think>so",
    ) -> None:
        card, blobs = served(context_len=CONTEXT_LEN, template=template)
        with_tokenizer(card, blobs, tokenizer, eos)
        super().__init__(self._walk, [card], blobs)
        self.words = tokenizers.Tokenizer.from_buffer(tokenizer)
        self.vocabulary = Words(tokenizer, card.vocab_size, list(card.eos_ids))
        self._thought = self.encode(thought)
        encode = self.vocabulary.tokenizer.encode_within
        self._preferred = [encode(text) for text in preferred]

    async def _walk(self, router: FakeRouter, start: pb.Start) -> AsyncGenerator[Event, None]:
        yield placed(start)
        grammar = start.params.grammar
        walk = Walk(grammar.source, self.vocabulary)
        walk.finish(random.Random(start.seed), self._preferred)
        ids = [*walk.ids, self.cards[0].eos_ids[0]]
        if grammar.begins_after:
            ids = [*self._thought, *grammar.begins_after, *ids]
        for position, token in enumerate(ids):
            finish = pb.STOP if position + 1 == len(ids) else pb.FINISH_REASON_UNSPECIFIED
            yield tokens(start, [token], position, 0, finish)
            await asyncio.sleep(0)
        yield finished(start)
