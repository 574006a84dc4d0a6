"""/api/embed and /api/embeddings: texts in, vectors out."""

from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from pdserve.gateway.caller import Caller
from pdserve.gateway.http import JsonPieces, object_json
from pdserve.gateway.ollama.models import served_name
from pdserve.gateway.ollama.reply import times
from pdserve.gateway.ollama.request_models import OllamaEmbedBody, OllamaEmbeddingsBody
from pdserve.gateway.openai import EmbeddingReply
from pdserve.gateway.pooling import PreparedInputs, shaped
from pdserve.gateway.service import Service


class _Vectors(EmbeddingReply):
    """The answer of /api/embed: vectors of length 1. A text that is too long keeps its start."""

    keeps_start = True

    def _item(self, number: int, values: Sequence[float], normalizes: bool) -> JsonPieces:
        return JsonPieces((to_json(shaped(values, self._body.dimensions, True).tolist()),))

    def _answer(self, prepared: PreparedInputs, vectors: JsonPieces) -> dict[str, Any]:
        durations = times(prepared.meter.state())
        return {
            "model": prepared.model.card.name,
            "embeddings": vectors,
            "total_duration": durations["total_duration"],
            "load_duration": durations["load_duration"],
            "prompt_eval_count": prepared.num_tokens,
        }


class _Vector(EmbeddingReply):
    """The single vector of /api/embeddings."""

    keeps_start = True

    def _item(self, number: int, values: Sequence[float], normalizes: bool) -> JsonPieces:
        return JsonPieces((to_json(shaped(values, None, normalizes).tolist()),))

    def _answer(self, prepared: PreparedInputs, vectors: JsonPieces) -> dict[str, Any]:
        return {"embedding": JsonPieces(vectors[1:-1])}


async def embed(
    service: Service, body: OllamaEmbedBody | OllamaEmbeddingsBody, caller: Caller
) -> JsonPieces:
    """Return the JSON text of the answer. Raises ServiceError."""
    name = await served_name(service, body.model or "")
    is_batch = isinstance(body, OllamaEmbedBody)
    embedding = body.embedding()
    if embedding is not None:
        embedding.model = name
        return await (_Vectors if is_batch else _Vector)(service, embedding, caller).whole()
    with service.limits.admit(caller.tenant.id):
        await service.count(caller)
        model = await service.catalog.get(name)
    empty = {"model": model.card.name, "embeddings": []} if is_batch else {"embedding": []}
    return object_json(empty)
