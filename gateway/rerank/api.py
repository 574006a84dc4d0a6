"""/rerank (with Cohere's and Jina's fields) and /score (with vLLM's), as an HttpApi: request
bodies, responses and routes. Both are also served below /v1, and /v2/rerank returns Cohere's
format. Errors have OpenAI's format, as in vLLM."""

import time
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema

from pdserve.gateway.caller import Caller
from pdserve.gateway.http.api import HttpApi
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.http.docs import ResponseModel, describe
from pdserve.gateway.http.fields import NON_GENERATION_FIELDS
from pdserve.gateway.http.guard import caller_of
from pdserve.gateway.http.responses import Reply
from pdserve.gateway.http.validation import ModelName
from pdserve.gateway.openai import ErrorObject, OpenAiErrors, PromptUsage
from pdserve.gateway.openai.request_models import OwnedBody, parse
from pdserve.gateway.rerank.pairs import ScoreRequest
from pdserve.gateway.rerank.scores import Scored, score
from pdserve.gateway.sampling import refuse
from pdserve.gateway.service import Service

MAX_TEXTS = 2048
# vLLM's names for the texts of /score, first and second.
PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


def _as_list(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and len(texts) > MAX_TEXTS:
        raise ValueError(f"at most {MAX_TEXTS} texts, not {len(texts)}")
    return texts


def _documents(value: Any) -> Any:
    """Convert the field `documents` to a list of texts: an object with a field `text` becomes that
    text. Raises ValueError for too many."""
    texts = _as_list(value)
    if not isinstance(texts, list):
        return texts
    return [item["text"] if isinstance(item, dict) and "text" in item else item for item in texts]


_TEXT = {"type": "string"}
_TEXT_OBJECT = {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}


def _described(*kinds: dict[str, Any], single: bool = False) -> WithJsonSchema:
    """Return the JSON schema of a field that is a list of items of the types `kinds`; with
    `single`, also of a single text."""
    item = kinds[0] if len(kinds) == 1 else {"anyOf": list(kinds)}
    array = {"type": "array", "items": item, "minItems": 1, "maxItems": MAX_TEXTS}
    return WithJsonSchema({"anyOf": [_TEXT, array]} if single else array)


Texts = Annotated[
    list[str], Field(min_length=1), BeforeValidator(_as_list), _described(_TEXT, single=True)
]


class ScoringBody(OwnedBody):
    """The fields that rerank and score bodies share."""

    checked = NON_GENERATION_FIELDS
    model: ModelName = ""
    instruction: str | None = Field(None, min_length=1)  # to a reranker
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    use_activation: Literal[True] | None = None  # not served otherwise
    activation: Literal[True] | None = None  # its earlier names
    softmax: Literal[True] | None = None

    def _request(
        self,
        api: str,
        operation: str,
        queries: list[str],
        documents: list[str],
        names: tuple[str, str],
    ) -> ScoreRequest:
        return ScoreRequest(
            api,
            operation,
            self.model,
            queries,
            documents,
            names,
            self.instruction,
            self.truncate_prompt_tokens,
            (self.cache_salt or "").encode(),
            self.priority or 0,
        )


class RerankBody(ScoringBody):
    """Body of /rerank and /v1/rerank."""

    query: str
    documents: Annotated[
        list[str],
        Field(min_length=1),
        BeforeValidator(_documents),
        _described(_TEXT, _TEXT_OBJECT, single=True),
    ]
    top_n: int | None = Field(None, ge=0)  # 0: all, as vLLM
    return_documents: bool | None = None
    max_tokens_per_doc: None = None  # not served; truncate_prompt_tokens is
    max_chunks_per_doc: None = None  # not served
    rank_fields: None = None  # not served

    def request(self) -> ScoreRequest:
        names = ("query", "documents")
        return self._request("Rerank (Score)", "rerank", [self.query], self.documents, names)


class ScoreBody(ScoringBody):
    """Body of /score and /v1/score."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    def request(self) -> ScoreRequest:
        """Return the request. Raises ServiceError unless exactly one pair of text fields is set and
        their lengths match."""
        present = {name for pair in PAIRS for name in pair if getattr(self, name) is not None}
        names = next((pair for pair in PAIRS if set(pair) == present), None)
        if names is None:
            pairs = ", or ".join(" and ".join(pair) for pair in PAIRS)
            missing = next((name for name in PAIRS[0] if name not in present), PAIRS[0][0])
            raise refuse(missing, f"set {pairs}")
        first, second = (getattr(self, name) for name in names)
        if len(first) not in (1, len(second)):
            text = f"{names[0]} must have one text, or as many as {names[1]}: {len(second)}"
            raise refuse(names[0], f"{text}, not {len(first)}")
        return self._request("Score", "score", first, second, names)


class RankedDocument(ResponseModel):
    text: str


class RerankResult(ResponseModel):
    """A document and its score; `index` is the document's position in the request."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RerankAnswer(ResponseModel):
    """The answer of /rerank: documents with scores, the best first."""

    id: str
    model: str
    usage: PromptUsage
    results: list[RerankResult]


class CohereVersion(ResponseModel):
    version: Literal["2"]


class CohereTokens(ResponseModel):
    input_tokens: int
    output_tokens: int


class CohereMeta(ResponseModel):
    api_version: CohereVersion
    tokens: CohereTokens


class CohereRerankAnswer(RerankAnswer):
    """The answer of /v2/rerank: that of /rerank with Cohere's field `meta`."""

    meta: CohereMeta


class ScoreObject(ResponseModel):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(ResponseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreObject]
    usage: PromptUsage


class RerankApi(OpenAiErrors, HttpApi):
    """The rerank and score routes as an HttpApi: /rerank sorts documents by their score for a
    query, /score returns scores in the order of the request."""

    paths: tuple[str, ...] = ("/v1/rerank", "/v2/rerank", "/v1/score", "/rerank", "/score")
    error_model: type[BaseModel] = ErrorObject

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._service = service
        self._bodies = bodies

    def add_routes(self, app: FastAPI) -> None:
        rerank_fields = describe(RerankBody, response=RerankAnswer)
        score_fields = describe(ScoreBody, response=ScoreList)

        @app.post("/v1/rerank", **rerank_fields)
        @app.post("/rerank", **rerank_fields)
        async def rerank_route(request: Request) -> Response:
            """Sort documents by how well they answer a query."""
            body = await self._bodies.read(request, partial(parse, RerankBody))
            return Reply(rerank(self._service, body, caller_of(request)), self)

        @app.post("/v2/rerank", **describe(RerankBody, response=CohereRerankAnswer))
        async def rerank_v2(request: Request) -> Response:
            """Sort documents by how well they answer a query, in the format of Cohere's API v2."""
            body = await self._bodies.read(request, partial(parse, RerankBody))
            return Reply(cohere_rerank(self._service, body, caller_of(request)), self)

        @app.post("/v1/score", **score_fields)
        @app.post("/score", **score_fields)
        async def score_route(request: Request) -> Response:
            """Score how well each text answers or resembles another."""
            body = await self._bodies.read(request, partial(parse, ScoreBody))
            return Reply(scores(self._service, body, caller_of(request)), self)


async def cohere_rerank(service: Service, body: RerankBody, caller: Caller) -> dict[str, Any]:
    """Return the answer of /v2/rerank in Cohere's format; it contains the documents only if
    `return_documents` is true. Raises ServiceError."""
    with_documents = body.return_documents is True
    answer = await rerank(service, body, caller, with_documents=with_documents)
    tokens = {"input_tokens": answer["usage"]["prompt_tokens"], "output_tokens": 0}
    return {**answer, "meta": {"api_version": {"version": "2"}, "tokens": tokens}}


async def rerank(
    service: Service, body: RerankBody, caller: Caller, *, with_documents: bool = True
) -> dict[str, Any]:
    """Return the answer of /rerank: the best documents first, those with equal scores in the
    request's order. Raises ServiceError."""
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
    """Return the answer of /score: a score for each document, in the request's order. Raises
    ServiceError."""
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
