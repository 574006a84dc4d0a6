"""The answers of /rerank and /score, for the API description; dialect.py makes them."""

from typing import Literal

from pdserve.gateway.http.docs.document import AnswerModel
from pdserve.gateway.openai.answers import PromptUsage


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
