"""Scores of documents for a query: a reranker's judgement, or the similarity of two embeddings."""

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from pdserve.gateway.catalog import ServedModel
from pdserve.gateway.openai.embeddings import embedding_ids
from pdserve.gateway.pooling.runs import PreparedInputs
from pdserve.gateway.pooling.vectors import cosine
from pdserve.gateway.requests.caller import Caller
from pdserve.gateway.rerank.prompt import judging_ids
from pdserve.gateway.sampling import refuse
from pdserve.gateway.service import Service, not_supported

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Documents to score, each for the query beside it; a single query is for all of them."""

    api: str  # name in errors
    operation: str  # name in traces
    model: str
    queries: Sequence[str]
    documents: Sequence[str]
    names: tuple[str, str]  # of the fields with queries and documents
    instruction: str | None = None  # to a reranker
    kept_tokens: int | None = None
    cache_salt: bytes = b""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores in the order of the documents."""

    model: str
    scores: Sequence[float]
    num_tokens: int  # of all prompts


async def score(service: Service, request: ScoreRequest, caller: Caller) -> Scored:
    """Return the scores of the documents. Raises ServiceError."""
    owner = caller.tenant.id
    query_field, document_field = request.names

    async def tokenized(model: ServedModel) -> Sequence[Collection[int]]:
        if model.card.pooling:
            if request.instruction is not None:
                raise refuse("instruction", "instruction: an embedding model does not support one")
            texts = ((request.queries, query_field), (request.documents, document_field))
            return [
                ids
                for sources, name in texts
                for ids in await embedding_ids(
                    service, model, sources, name, owner, request.kept_tokens
                )
            ]
        if not model.card.score_token_ids:
            raise not_supported(request.api)
        pairs = [(_query_of(request.queries, n), text) for n, text in enumerate(request.documents)]
        return await judging_ids(
            service, model, pairs, request.instruction, document_field, owner, request.kept_tokens
        )

    async with service.prepare_inputs(
        request.operation, request.model, tokenized, request.cache_salt, request.priority, caller
    ) as prepared:
        if prepared.model.card.pooling:
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
        scores.append(cosine(_query_of(queries, n), vector))
        await asyncio.sleep(0)  # a long vector takes part of a millisecond
    return scores


def _query_of(queries: Sequence[T], number: int) -> T:
    """Return the query of a document."""
    return queries[number if len(queries) > 1 else 0]


async def _in_order(answers: AsyncGenerator[tuple[int, T], None]) -> list[T]:
    async with aclosing(answers) as numbered:
        by_number = {number: answer async for number, answer in numbered}
    return [by_number[number] for number in range(len(by_number))]
