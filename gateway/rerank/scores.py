"""Scores documents for a query: with a reranker, which judges each pair of query and document, or
by the similarity of two embeddings.

A reranker with a classification head reads the pair as its tokenizer frames it; the others answer
yes or no.

Their prompt is that of Qwen3-Reranker's model card. The fixed text around query and document
is tokenized separately, as in the model card, so that a client's text never becomes a special
token. The document is tokenized separately too; it follows a line break, where Qwen's tokenizer
always starts a new token.
"""

import asyncio
from array import array
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from pdserve.gateway.caller import Caller
from pdserve.gateway.catalog import ServedModel
from pdserve.gateway.model_texts import check_room
from pdserve.gateway.openai import embedding_ids
from pdserve.gateway.pooling import PreparedInputs, cosine
from pdserve.gateway.sampling import refuse
from pdserve.gateway.service import Service, not_supported
from pdserve.services.common.capabilities import Scoring, scoring_of
from pdserve.services.common.errors import ServiceError

BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
ANSWER_TOKENS = 1
MAX_CALL_TOKENS = 1 << 22  # of all prompts of a call
T = TypeVar("T")


class JudgingIds(Collection[int]):
    """The token ids of a reranker's prompt, as parts that the prompts of one call share: separate
    copies for 2,048 prompts with a long query would take gigabytes."""

    def __init__(self, *parts: Sequence[int]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._parts)

    def __contains__(self, token: object) -> bool:
        return any(token in part for part in self._parts)


async def judging_ids(
    service: Service,
    model: ServedModel,
    pairs: Sequence[tuple[str, str]],
    instruction: str | None,
    param: str,
    owner: bytes,
    kept_tokens: int | None,
) -> Sequence[Collection[int]]:
    """Return the token ids of a reranker's prompt for each pair of query and document.
    `kept_tokens` is the maximum length of a prompt, beyond which the end of its text is cut; -1
    means the length of the model's context, None cuts nothing. Raises ServiceError that names the
    field `param`."""

    async def ids(text: str, *, special: bool) -> "array[int]":
        token_ids = await service.texts.text_ids(
            model, text, param, owner, add_special_tokens=False, parse_special=special
        )
        return array("I", token_ids)

    prefix, suffix = await ids(BEFORE, special=True), await ids(AFTER, special=True)
    max_text_tokens = (
        None
        if kept_tokens is None
        else _max_text_tokens(model, kept_tokens, len(prefix) + len(suffix))
    )
    query_ids: dict[str, Sequence[int]] = {}  # by query
    prompts: list[JudgingIds] = []
    num_tokens = 0
    for query, document in pairs:
        if query not in query_ids:
            text = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n"
            query_ids[query] = (await ids(text, special=False))[:max_text_tokens]
        query_part = query_ids[query]
        remaining = None if max_text_tokens is None else max_text_tokens - len(query_part)
        document_part = (await ids(f"<Document>: {document}", special=False))[:remaining]
        prompt = JudgingIds(prefix, query_part, document_part, suffix)
        check_room(len(prompt), ANSWER_TOKENS, model, param)
        num_tokens += len(prompt)
        if num_tokens > MAX_CALL_TOKENS:
            raise _too_many(param)
        prompts.append(prompt)
        await asyncio.sleep(0)
    return prompts


async def pair_ids(
    service: Service,
    model: ServedModel,
    pairs: Sequence[tuple[str, str]],
    instruction: str | None,
    param: str,
    owner: bytes,
    kept_tokens: int | None,
) -> Sequence[Collection[int]]:
    """Return the token ids of each pair of query and document for a model with a classification
    head. `kept_tokens` as for judging_ids. Raises ServiceError that names a field."""
    if instruction is not None:
        raise refuse("instruction", "instruction: this reranker does not support an instruction")
    context = model.card.context_len
    if kept_tokens is not None and not (kept_tokens == -1 or 1 <= kept_tokens <= context):
        raise refuse(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens must be -1, or from 1 to {context}",
        )
    prompts: list[Collection[int]] = []
    num_tokens = 0
    for pair in pairs:
        kept = context if kept_tokens == -1 else kept_tokens
        ids = await service.texts.pair_ids(model, pair, param, owner, kept)
        check_room(len(ids), 0, model, param)
        num_tokens += len(ids)
        if num_tokens > MAX_CALL_TOKENS:
            raise _too_many(param)
        prompts.append(array("I", ids))
    return prompts


def _max_text_tokens(model: ServedModel, kept_tokens: int, frame_tokens: int) -> int:
    """Return how many tokens query and document may have together, besides the `frame_tokens` of
    the fixed text. Raises ServiceError if `kept_tokens` is out of range."""
    max_tokens = model.card.context_len - ANSWER_TOKENS
    if kept_tokens != -1 and not frame_tokens < kept_tokens <= max_tokens:
        allowed = f"-1, or from {frame_tokens + 1} to {max_tokens}"
        raise refuse("truncate_prompt_tokens", f"truncate_prompt_tokens must be {allowed}")
    return max(1, (max_tokens if kept_tokens == -1 else kept_tokens) - frame_tokens)


def _too_many(param: str) -> ServiceError:
    text = f"the prompts of all {param} have more than {MAX_CALL_TOKENS} tokens in total"
    return refuse(param, text)


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Documents to score for queries: one query for all documents, or one query per document."""

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
    """The scores of a request's documents, in the order of the documents."""

    model: str
    scores: Sequence[float]
    num_tokens: int  # of all prompts


async def score(service: Service, request: ScoreRequest, caller: Caller) -> Scored:
    """Compute the score of each document for its query. Raises ServiceError."""
    owner = caller.tenant.id
    query_field, document_field = request.names

    async def tokenized(model: ServedModel) -> Sequence[Collection[int]]:
        kind = scoring_of(model.card)
        if kind is None:
            raise not_supported(request.api)
        if kind is Scoring.SIMILARITY:
            if request.instruction is not None:
                raise refuse(
                    "instruction", "instruction: embedding models do not support an instruction"
                )
            texts = ((request.queries, query_field), (request.documents, document_field))
            return [
                ids
                for sources, name in texts
                for ids in await embedding_ids(
                    service, model, sources, name, owner, request.kept_tokens
                )
            ]
        pairs = [(_query_of(request.queries, n), text) for n, text in enumerate(request.documents)]
        ids_of = pair_ids if kind is Scoring.HEAD else judging_ids
        return await ids_of(
            service, model, pairs, request.instruction, document_field, owner, request.kept_tokens
        )

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
        scores.append(cosine(_query_of(queries, n), vector))
        await asyncio.sleep(0)  # a long vector takes part of a millisecond
    return scores


def _query_of(queries: Sequence[T], number: int) -> T:
    """Return the query (or its vector) for the document with index `number`; a single query is for
    all."""
    return queries[number if len(queries) > 1 else 0]


async def _in_order(answers: AsyncGenerator[tuple[int, T], None]) -> list[T]:
    async with aclosing(answers) as numbered:
        by_number = {number: answer async for number, answer in numbered}
    return [by_number[number] for number in range(len(by_number))]
