"""Bodies of /rerank (Cohere's and Jina's fields) and of /score (vLLM's), and their requests."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from pdserve.gateway.http import NON_GENERATION_FIELDS, ModelName
from pdserve.gateway.openai.request_models import OwnedBody
from pdserve.gateway.rerank.scores import ScoreRequest
from pdserve.gateway.sampling import refuse

MAX_TEXTS = 2048
# vLLM's names for the texts of /score, first and second.
PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


def _as_list(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and len(texts) > MAX_TEXTS:
        raise ValueError(f"at most {MAX_TEXTS} texts, not {len(texts)}")
    return texts


def _documents(value: Any) -> Any:
    """Return the texts, taking the `text` of objects that have one."""
    texts = _as_list(value)
    if not isinstance(texts, list):
        return texts
    return [item["text"] if isinstance(item, dict) and "text" in item else item for item in texts]


_TEXT = {"type": "string"}
_TEXT_OBJECT = {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}


def _described(*kinds: dict[str, Any], single: bool = False) -> WithJsonSchema:
    """Return the JSON schema of a list of these kinds, or with `single` also of a text."""
    item = kinds[0] if len(kinds) == 1 else {"anyOf": list(kinds)}
    array = {"type": "array", "items": item, "minItems": 1, "maxItems": MAX_TEXTS}
    return WithJsonSchema({"anyOf": [_TEXT, array]} if single else array)


Texts = Annotated[
    list[str], Field(min_length=1), BeforeValidator(_as_list), _described(_TEXT, single=True)
]


class ScoringBody(OwnedBody):
    """The fields that both have."""

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
        """Return the request. Raises ServiceError for fields that contradict each other."""
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
