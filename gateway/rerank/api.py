"""/rerank and /score on the HTTP shell, also below /v1 and with Cohere's answer below /v2; errors
are OpenAI's, as in vLLM.
"""

import time
from collections.abc import Awaitable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from pydantic_core import to_json

from pdserve.gateway.caller import Caller
from pdserve.gateway.http import (
    REQUEST_ID,
    AnswerModel,
    BodyReader,
    HttpError,
    Reply,
    caller_of,
    described,
)
from pdserve.gateway.openai import ErrorObject, PromptUsage, error_object
from pdserve.gateway.openai.request_models import parse
from pdserve.gateway.rerank.request_models import RerankBody, ScoreBody
from pdserve.gateway.rerank.scores import Scored, score
from pdserve.gateway.service import Service


class RankedDocument(AnswerModel):
    text: str


class RerankResult(AnswerModel):
    """`index` is that of the request's document."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RerankAnswer(AnswerModel):
    """The best documents first."""

    id: str
    model: str
    usage: PromptUsage
    results: list[RerankResult]


class CohereVersion(AnswerModel):
    version: Literal["2"]


class CohereTokens(AnswerModel):
    input_tokens: int
    output_tokens: int


class CohereMeta(AnswerModel):
    api_version: CohereVersion
    tokens: CohereTokens


class CohereRerankAnswer(RerankAnswer):
    """The answer of /v2/rerank; `meta` is Cohere's."""

    meta: CohereMeta


class ScoreObject(AnswerModel):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(AnswerModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreObject]
    usage: PromptUsage


class RerankDialect:
    """API that scores documents for a query, sorted or in order."""

    paths: tuple[str, ...] = ("/v1/rerank", "/v2/rerank", "/v1/score", "/rerank", "/score")
    not_offered: tuple[str, ...] = ()
    statuses: Mapping[int, int] = MappingProxyType({})  # all as they are
    request_id_header: str = REQUEST_ID
    error_model: type[BaseModel] = ErrorObject

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._service = service
        self._bodies = bodies

    def error_object(self, error: HttpError) -> dict[str, Any]:
        return error_object(error)

    def error_event(self, error: HttpError) -> bytes:
        return b"data: " + to_json(error_object(error)) + b"\n\n"

    def add_routes(self, app: FastAPI) -> None:
        rerank_fields = described(RerankBody, answer=RerankAnswer)
        score_fields = described(ScoreBody, answer=ScoreList)

        @app.post("/v1/rerank", **rerank_fields)
        @app.post("/rerank", **rerank_fields)
        async def rerank_route(request: Request) -> Response:
            """Sort documents by how well they answer a query."""
            body = await self._bodies.read(request, partial(parse, RerankBody))
            return self._reply(rerank(self._service, body, caller_of(request)))

        @app.post("/v2/rerank", **described(RerankBody, answer=CohereRerankAnswer))
        async def rerank_v2(request: Request) -> Response:
            """Sort documents by how well they answer a query, in the format of Cohere's API v2."""
            body = await self._bodies.read(request, partial(parse, RerankBody))
            return self._reply(cohere_rerank(self._service, body, caller_of(request)))

        @app.post("/v1/score", **score_fields)
        @app.post("/score", **score_fields)
        async def score_route(request: Request) -> Response:
            """Score how well each text answers or resembles another."""
            body = await self._bodies.read(request, partial(parse, ScoreBody))
            return self._reply(scores(self._service, body, caller_of(request)))

    def _reply(self, work: Awaitable[dict[str, Any]]) -> Reply:
        return Reply(work, self)


async def cohere_rerank(service: Service, body: RerankBody, caller: Caller) -> dict[str, Any]:
    """Rerank as Cohere: documents only if the client wants them. Raises ServiceError."""
    with_documents = body.return_documents is True
    answer = await rerank(service, body, caller, with_documents=with_documents)
    tokens = {"input_tokens": answer["usage"]["prompt_tokens"], "output_tokens": 0}
    return {**answer, "meta": {"api_version": {"version": "2"}, "tokens": tokens}}


async def rerank(
    service: Service, body: RerankBody, caller: Caller, *, with_documents: bool = True
) -> dict[str, Any]:
    """Return the best documents first, ties in the request's order. Raises ServiceError."""
    id_ = f"rerank-{caller.request_id}"
    scored = await score(service, body.request(), body.called_by(caller, id_))
    order = sorted(range(len(scored.scores)), key=lambda n: -scored.scores[n])
    results: list[dict[str, Any]] = []
    for n in order[: body.top_n or None]:
        result: dict[str, Any] = {"index": n, "relevance_score": scored.scores[n]}
        if with_documents and body.return_documents is not False:
            result["document"] = {"text": body.documents[n]}
        results.append(result)
    return {"id": id_, "model": scored.model, "usage": _usage(scored), "results": results}


async def scores(service: Service, body: ScoreBody, caller: Caller) -> dict[str, Any]:
    """Return all scores in the documents' order. Raises ServiceError."""
    id_ = f"score-{caller.request_id}"
    scored = await score(service, body.request(), body.called_by(caller, id_))
    return {
        "id": id_,
        "object": "list",
        "created": int(time.time()),
        "model": scored.model,
        "data": [
            {"index": n, "object": "score", "score": value} for n, value in enumerate(scored.scores)
        ],
        "usage": _usage(scored),
    }


def _usage(scored: Scored) -> dict[str, int]:
    return {"prompt_tokens": scored.num_tokens, "total_tokens": scored.num_tokens}
