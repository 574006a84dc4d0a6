"""Scores documents for a query: with a reranker, which judges each pair of query and document
(pairs.py), or by the similarity of two embeddings."""

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from pdserve.gateway.caller import Caller
from pdserve.gateway.catalog import ServedModel
from pdserve.gateway.openai import embedding_ids
from pdserve.gateway.pooling import PreparedInputs, cosine
from pdserve.gateway.rerank.pairs import PairPrompts, ScoreRequest
from pdserve.gateway.sampling import refuse
from pdserve.gateway.service import Service, not_supported
from pdserve.services.common.capabilities import Scoring, scoring_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of a request's documents, in the order of the documents."""

    model: str
    scores: Sequence[float]
    num_tokens: int  # of all prompts


async def score(service: Service, request: ScoreRequest, caller: Caller) -> Scored:
    """Compute the score of each document for its query. Raises ServiceError."""
    owner = caller.tenant.id

    async def tokenized(model: ServedModel) -> Sequence[Collection[int]]:
        kind = scoring_of(model.card)
        if kind is None:
            raise not_supported(request.api)
        if kind is Scoring.SIMILARITY:
            if request.instruction is not None:
                raise refuse(
                    "instruction", "instruction: embedding models do not support an instruction"
                )
            texts = zip((request.queries, request.documents), request.names, strict=True)
            return [
                ids
                for sources, name in texts
                for ids in await embedding_ids(
                    service, model, sources, name, owner, request.kept_tokens
                )
            ]
        return await PairPrompts(service.texts, model, request, owner).build()

    async with service.prepare_inputs(
        request.operation, request.model, tokenized, request.cache_salt, request.priority, caller
    ) as prepared:
        kind = scoring_of(prepared.model.card)
        scores: Sequence[float]
        if kind is Scoring.HEAD:
            scores = await _in_order(service.pooling.relevances(prepared))
        elif kind is Scoring.SIMILARITY:
            scores = await _similarities(service, request, prepared)
        else:
            scores = await _in_order(service.pooling.scores(prepared))
        return Scored(prepared.model.card.name, scores, prepared.num_tokens)


async def _similarities(
    service: Service, request: ScoreRequest, prepared: PreparedInputs
) -> Sequence[float]:
    vectors = await _in_order(service.pooling.embeddings(prepared))
    count = len(request.queries)
    queries, documents = vectors[:count], vectors[count:]
    scores = []
    for n, vector in enumerate(documents):
        scores.append(cosine(queries[n if count > 1 else 0], vector))
        await asyncio.sleep(0)  # a long vector takes part of a millisecond
    return scores


async def _in_order(answers: AsyncGenerator[tuple[int, T], None]) -> list[T]:
    async with aclosing(answers) as numbered:
        by_number = {number: answer async for number, answer in numbered}
    return [by_number[number] for number in range(len(by_number))]
