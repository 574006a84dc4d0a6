"""/v1/embeddings: computes one vector for each text or list of token ids."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import to_json

from pdserve.gateway.caller import Caller
from pdserve.gateway.catalog import ServedModel
from pdserve.gateway.http.api import JsonPieces, array_json, object_json
from pdserve.gateway.http.fields import NON_GENERATION_FIELDS
from pdserve.gateway.http.validation import ModelName
from pdserve.gateway.model_texts import check_ids, check_room, kept_ids
from pdserve.gateway.openai.request_models import OwnedBody, base, texts_or_ids
from pdserve.gateway.pooling import PreparedInputs, base64_of, shaped
from pdserve.gateway.sampling import refuse
from pdserve.gateway.service import Service, not_supported
from pdserve.services.common.capabilities import embeds, generates

MAX_INPUTS = 2048  # as in OpenAI
MAX_ANSWER_BYTES = 128 << 20  # of the vectors of a call
_NUMBER_BYTES = {False: 22, True: 16 / 3}  # of the text of one number, by whether it is base64


class EmbeddingBody(OwnedBody):
    """Body of /v1/embeddings."""

    checked = NON_GENERATION_FIELDS
    model: ModelName = ""
    input: Annotated[
        Any,
        AfterValidator(lambda value: texts_or_ids(value, MAX_INPUTS, "inputs")),
        WithJsonSchema(base.texts_or_ids(MAX_INPUTS)),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    normalize: Literal[True] | None = None  # only true is served: the model decides
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None
    # Not served: text that others put before an input, and other names of `dimensions` and the
    # format.
    input_type: None = None
    task: None = None
    output_dimension: None = None
    output_dtype: None = None


class EmbeddingReply:
    """Computes the embeddings for a validated request body."""

    keeps_start = False  # keep the start of a text that is too long, instead of its end

    def __init__(self, service: Service, body: EmbeddingBody, caller: Caller) -> None:
        self._service = service
        self._body = body
        self._id = f"embd-{caller.request_id}"
        self._caller = body.called_by(caller, self._id)
        self._created = int(time.time())
        self._in_base64 = body.encoding_format == "base64"

    async def whole(self) -> JsonPieces:
        """Compute the embeddings and return the JSON text of the response. Each vector is converted
        separately, since all at once would block the event loop. Raises ServiceError."""
        service, body = self._service, self._body
        salt, priority = (body.cache_salt or "").encode(), body.priority or 0
        async with service.prepare_inputs(
            "embeddings", body.model, self._tokenized, salt, priority, self._caller
        ) as prepared:
            items: dict[int, JsonPieces] = {}
            async with aclosing(service.pooling.embeddings(prepared)) as answers:
                async for number, values in answers:
                    items[number] = self._item(number, values, prepared.model.card.normalizes)
            vectors = array_json(items[number] for number in range(len(items)))
            return object_json(self._answer(prepared, vectors))

    def _answer(self, prepared: PreparedInputs, vectors: JsonPieces) -> dict[str, Any]:
        total = prepared.num_tokens
        return {
            "id": self._id,
            "object": "list",
            "created": self._created,
            "data": vectors,
            "model": prepared.model.card.name,
            "usage": {"prompt_tokens": total, "total_tokens": total},
        }

    def _item(self, number: int, values: Sequence[float], normalizes: bool) -> JsonPieces:
        vector = shaped(values, self._body.dimensions, normalizes)
        embedding = base64_of(vector) if self._in_base64 else vector.tolist()
        item = {"object": "embedding", "index": number, "embedding": embedding}
        return JsonPieces((to_json(item),))

    def _check_size(self, dimensions: int) -> None:
        """Raise ServiceError if the response, with vectors of `dimensions` numbers, would be longer
        than MAX_ANSWER_BYTES."""
        num_bytes = len(self._body.input) * dimensions * _NUMBER_BYTES[self._in_base64]
        if num_bytes > MAX_ANSWER_BYTES:
            base64_hint = "" if self._in_base64 else "encoding_format: base64, "
            text = f"{len(self._body.input)} vectors of {dimensions} numbers exceed the size limit"
            raise refuse(
                "input", f"input: {text}; request {base64_hint}fewer dimensions or fewer inputs"
            )

    async def _tokenized(self, model: ServedModel) -> list[Sequence[int]]:
        card = model.card
        if not embeds(card):
            remedy = "; start its workers with --pool last or mean for embeddings too"
            raise not_supported("Embeddings", remedy if generates(card) else "")
        if self._body.dimensions is not None and self._body.dimensions > card.hidden_size:
            limit = card.hidden_size
            raise refuse("dimensions", f"dimensions must be from 1 to {limit} for this model")
        self._check_size(self._body.dimensions or card.hidden_size)
        return await embedding_ids(
            self._service,
            model,
            self._body.input,
            "input",
            self._caller.tenant.id,
            self._body.truncate_prompt_tokens,
            add_special_tokens=self._body.add_special_tokens is not False,
            from_start=self.keeps_start,
        )


async def embedding_ids(
    service: Service,
    model: ServedModel,
    inputs: Sequence[str | Sequence[int]],
    param: str,
    owner: bytes,
    kept_tokens: int | None = None,
    *,
    add_special_tokens: bool = True,
    from_start: bool = False,
) -> list[Sequence[int]]:
    """Return the token ids of each input to embed, cut to `kept_tokens` if that is set. `param` is
    the name of the inputs' field in the request, for errors. Raises ServiceError for an input
    without tokens, with invalid ids, or longer than the model's context."""
    all_ids: list[Sequence[int]] = []
    for text_or_ids in inputs:
        if isinstance(text_or_ids, str):
            ids: Sequence[int] = await service.texts.text_ids(
                model, text_or_ids, param, owner, add_special_tokens=add_special_tokens
            )
        else:
            ids = text_or_ids
            await asyncio.sleep(0)
        ids = kept_ids(ids, kept_tokens, model, model.card.context_len, from_start=from_start)
        if not ids:
            raise refuse(param, f"{param} {len(all_ids)} has no tokens")
        check_room(len(ids), 0, model, param)
        if not isinstance(text_or_ids, str):
            check_ids(ids, model, param)
        all_ids.append(ids)
    return all_ids
