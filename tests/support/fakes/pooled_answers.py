"""Answers of a scripted router to requests for embeddings and for scores."""

from collections.abc import AsyncGenerator, Callable, Sequence

from fakes.router import (
    Event,
    FakeRouter,
    Play,
    finished,
    placed,
    saying,
    served,
    tokens,
    with_tokenizer,
)
from pdserve.protos import common_pb2 as pb

HIDDEN = 4
YES, NO = 10, 11


def embedder(name: str = "embedder", normalizes: bool = True, context_len: int = 512) -> FakeRouter:
    """Serve an embedding model; the state of a prompt is `vector_of` its ids."""
    card, blobs = served(name, context_len)
    card.pooling, card.normalizes, card.hidden_size = "last", normalizes, HIDDEN
    return FakeRouter(embedding(vector_of), [card], blobs)


def embedding_chat(pool: str) -> FakeRouter:
    """Serve a generating model that also embeds, as with --pool."""
    card, blobs = served()
    card.pool, card.normalizes, card.hidden_size = pool, True, HIDDEN
    embeds, says = embedding(vector_of), saying("hello")
    return FakeRouter(
        lambda router, start: (embeds if start.pool else says)(router, start), [card], blobs
    )


def reranker(logits: Callable[[Sequence[int]], tuple[float, float]]) -> FakeRouter:
    """Serve a model that answers yes or no with these logits."""
    card, blobs = served("reranker")
    card.score_token_ids.extend((YES, NO))
    return FakeRouter(judging(logits), [card], blobs)


def cross_encoder(tokenizer: bytes) -> FakeRouter:
    """Serve a model with this tokenizer whose head scores pairs: by the length of their prompt."""
    card, blobs = served("scorer")
    card.scores_pairs = True
    with_tokenizer(card, blobs, tokenizer, ())
    return FakeRouter(embedding(lambda ids: [1 / len(ids)]), [card], blobs)


def vector_of(ids: Sequence[int]) -> list[float]:
    return [float(ids[0]), float(len(ids)), -float(ids[-1]), 0.5]


def embedding(values: Callable[[Sequence[int]], Sequence[float]]) -> Play:
    async def play(router: FakeRouter, start: pb.Start) -> AsyncGenerator[Event, None]:
        assert start.pool
        assert not start.HasField("params")
        yield placed(start)
        found = pb.Embedding(
            request=start.request, epoch=start.epoch, values=values(start.prompt_ids)
        )
        yield Event(embedding=found)
        yield finished(start)

    return play


def judging(logits: Callable[[Sequence[int]], tuple[float, float]]) -> Play:
    async def play(router: FakeRouter, start: pb.Start) -> AsyncGenerator[Event, None]:
        params = start.params
        assert (params.temperature, params.max_tokens, params.logprobs) == (0.0, 1, 0)
        assert params.HasField("logprobs")
        assert list(params.logprob_token_ids) == [YES, NO]
        yield placed(start)
        yes, no = logits(start.prompt_ids)
        event = tokens(start, [7], 0, finish=pb.LENGTH)
        event.tokens.logprobs[0].top_ids.extend((YES, NO))
        event.tokens.logprobs[0].top_logprobs.extend((yes - 9.0, no - 9.0))
        yield event
        yield finished(start)

    return play
