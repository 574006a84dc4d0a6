"""Generates the answers of Ollama's API: text, whole or as lines of JSON, embeddings, and
descriptions of the served models.

Invariant: a tool call is returned once, when it is complete.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from pydantic_core import to_json

from pdserve.gateway.caller import Caller
from pdserve.gateway.completion import HeldLogprobs
from pdserve.gateway.http.api import JsonList, JsonPieces, object_json
from pdserve.gateway.metrics import RequestSnapshot
from pdserve.gateway.ollama.request_models import OllamaEmbedBody, OllamaEmbeddingsBody
from pdserve.gateway.openai import EmbeddingReply, capabilities, llama_sampling, token_logprobs
from pdserve.gateway.pooling import PreparedInputs, shaped
from pdserve.gateway.prepared_completion import Usage
from pdserve.gateway.service import Service
from pdserve.protos.common_pb2 import ModelCard
from pdserve.text import (
    ChatCompletionRequest,
    ContentPart,
    Delta,
    ScoredToken,
    TextCompletionRequest,
    ToolCallPart,
    arguments_object,
    calls_of,
    reasoning_of,
    text_of,
)

LATEST = ":latest"  # the tag of a name without one
NEVER = "9999-12-31T23:59:59Z"
# Ollama's words for a model's capabilities, by those of /v1/models.
_CAPABILITIES = {
    "completion": "completion",
    "tools": "tools",
    "reasoning": "thinking",
    "embeddings": "embedding",
}


async def served_name(service: Service, name: str) -> str:
    """Return the model's name without the tag `:latest`, unless a served model or an alias has that
    tag."""
    if not name.endswith(LATEST) or await service.catalog.knows(name):
        return name
    return name.removesuffix(LATEST)


async def tags(service: Service) -> dict[str, Any]:
    """Return the answer of /api/tags: the served models and their aliases."""
    cards = await service.catalog.listed()
    return {"models": [_tag(name, card) for name, card in cards.items()]}


async def processes(service: Service) -> dict[str, Any]:
    """Return the answer of /api/ps: the loaded models, which are all served models and their
    aliases."""
    cards = await service.catalog.listed()
    return {
        "models": [
            {**_tag(name, card), "expires_at": NEVER, "context_length": card.context_len}
            for name, card in cards.items()
        ]
    }


async def show(service: Service, name: str) -> dict[str, Any]:
    """Return the answer of /api/show: the description of one model. Raises ServiceError."""
    model = await service.catalog.get(await served_name(service, name))
    card = model.card
    abilities = capabilities(service, card)
    defaults = llama_sampling(service, card, max_tokens="num_predict")
    info: dict[str, Any] = {
        "general.architecture": card.architecture,
        f"{card.architecture}.context_length": card.context_len,
        f"{card.architecture}.vocab_size": card.vocab_size,
    }
    if card.hidden_size:
        info[f"{card.architecture}.embedding_length"] = card.hidden_size
    return {
        "modified_at": _modified(card),
        "template": await service.catalog.template(card),
        "parameters": "\n".join(f"{name} {value}" for name, value in defaults.items()),
        "details": _details(card),
        "model_info": info,
        "capabilities": [text for name, text in _CAPABILITIES.items() if abilities[name]],
    }


def _tag(name: str, card: ModelCard) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": _modified(card),
        "size": card.weights_bytes,
        "digest": card.kv_identity.weights,
        "details": _details(card),
    }


def _details(card: ModelCard) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "",
        "family": card.architecture,
        "families": [card.architecture],
        "parameter_size": "",
        "quantization_level": card.kv_identity.quantization,
    }


def _modified(card: ModelCard) -> str:
    return time_text(datetime.fromtimestamp(card.created, UTC))


def time_text(time: datetime) -> str:
    """Return a UTC time as text in Ollama's format, with microseconds and a final Z."""
    return time.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


_REASONS = {"tool_calls": "stop"}  # finish reasons that this API names differently


class OllamaContent:
    """Converts the pieces of the model's output to messages in Ollama's format."""

    def __init__(self) -> None:
        self._call: list[ContentPart] = []  # parts of the incomplete call

    def push(self, delta: Delta) -> dict[str, Any]:
        """Add a piece of the model's output. Returns its `content`, `thinking` and the `tool_calls`
        that it completes; empty fields are left out."""
        calls = self._complete(delta)
        fields = {
            "content": text_of(delta.content),
            "thinking": reasoning_of(delta.content),
            "tool_calls": calls,
        }
        return {name: value for name, value in fields.items() if value}

    def _complete(self, delta: Delta) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []
        for part in delta.content:
            if isinstance(part, ToolCallPart):
                if part.id:  # the first part of another call
                    calls += self._take()
                self._call.append(part)
        if delta.finish is not None:
            calls += self._take()
        return calls

    def _take(self) -> list[dict[str, Any]]:
        calls = [_call(call) for call in calls_of(self._call)]
        self._call = []
        return calls


def joined(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the partial messages of a stream to one message."""
    message = {
        "content": "".join(part.get("content", "") for part in messages),
        "thinking": "".join(part.get("thinking", "") for part in messages),
        "tool_calls": [call for part in messages for call in part.get("tool_calls", ())],
    }
    return {name: value for name, value in message.items() if value}


def _call(call: ToolCallPart) -> dict[str, Any]:
    function = {"index": call.index, "name": call.name}
    return {
        "id": call.id,
        "function": {**function, "arguments": arguments_object(call.arguments, cut=call.cut)},
    }


class OllamaReply:
    """Generates the answer to a chat or a completion in Ollama's format. Call either `whole` or
    `lines`, once."""

    def __init__(
        self,
        service: Service,
        request: ChatCompletionRequest | TextCompletionRequest,
        caller: Caller,
        *,
        is_chat: bool,
    ) -> None:
        self._service = service
        self._request = request
        self._is_chat = is_chat
        self._caller = caller.of_body(f"ollama-{caller.request_id}", None, None)
        self._content = OllamaContent()
        self._model = ""
        self._end: dict[str, Any] = {}  # fields of the last line

    async def whole(self) -> JsonPieces:
        """Generate the whole answer and return its JSON text. Raises ServiceError."""
        messages, scores = [], JsonList()
        async with aclosing(self._messages(held=True)) as deltas:
            async for message, tokens in deltas:
                messages.append(message)
                scores.extend(_scores(tokens))
        answer = self._answer(joined(messages), self._end)
        if self._request.sampling.logprobs is not None:
            answer["logprobs"] = scores.pieces()
        return object_json(answer)

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Generate the answer and yield it as lines of JSON; the last one has the token counts and
        durations. Raises ServiceError."""
        async with aclosing(self._messages(held=False)) as deltas:
            async for message, tokens in deltas:
                extra = {"logprobs": _scores(tokens)} if tokens else {}
                if message or extra:
                    yield line(self._answer(message, {"done": False, **extra}))
        yield line(self._answer({}, self._end))

    async def _messages(
        self, *, held: bool
    ) -> AsyncGenerator[tuple[dict[str, Any], Sequence[ScoredToken]], None]:
        """Generate the answer and yield it as partial messages, each with the log-probabilities of
        its tokens. `held`: the caller keeps them all until the end, so their memory is limited."""
        name = await served_name(self._service, self._request.model)
        async with self._service.prepare(
            replace(self._request, model=name), self._caller
        ) as completion:
            self._model = completion.model.card.name
            scores = HeldLogprobs(completion) if held else None
            finish, usage = "", Usage(0, 0, 0)
            async with aclosing(self._service.completions.stream(completion)) as items:
                async for item in items:
                    if isinstance(item, Usage):
                        usage = item
                        continue
                    if scores is not None:
                        scores.add(item)
                    finish = item.finish or finish
                    yield self._content.push(item), item.tokens
            self._end = {
                "done": True,
                "done_reason": _REASONS.get(finish, finish),
                **times(completion.meter.state()),
                "prompt_eval_count": usage.prompt_tokens,
                "eval_count": usage.completion_tokens,
            }

    def _answer(self, message: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        return answer(self._model, message, extra, is_chat=self._is_chat)


async def load(service: Service, name: str, caller: Caller, *, is_chat: bool) -> dict[str, Any]:
    """Return the answer to a request without a prompt, with which clients of Ollama load a model.
    Raises ServiceError if the model is not served."""
    with service.limits.admit(caller.tenant.id):
        await service.count(caller)
        model = await service.catalog.get(await served_name(service, name))
    extra = {"done": True, "done_reason": "load"}
    return answer(model.card.name, {}, extra, is_chat=is_chat)


def answer(
    model: str, message: dict[str, Any], extra: dict[str, Any], *, is_chat: bool
) -> dict[str, Any]:
    """Return the JSON object of a whole answer, or of one line of a stream. `extra` has further
    fields of the object."""
    head = {"model": model, "created_at": time_text(datetime.now(UTC))}
    if is_chat:
        return {**head, "message": {"role": "assistant", "content": "", **message}, **extra}
    other_fields = {name: value for name, value in message.items() if name != "content"}
    return {**head, "response": message.get("content", ""), **other_fields, **extra}


def times(state: RequestSnapshot) -> dict[str, int]:
    """Return the durations of a request's phases (load, prompt, generation and total), in
    nanoseconds."""
    total_s = state.elapsed_s
    first_s = total_s if state.first_token_s is None else state.first_token_s
    prepared_s = first_s if state.prepared_s is None else state.prepared_s
    return {
        "total_duration": _nanoseconds(total_s),
        "load_duration": _nanoseconds(prepared_s),
        "prompt_eval_duration": _nanoseconds(first_s - prepared_s),
        "eval_duration": _nanoseconds(total_s - first_s),
    }


def line(value: dict[str, Any]) -> bytes:
    """Return a JSON object as one line of a stream."""
    return to_json(value) + b"\n"


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _scores(tokens: Sequence[ScoredToken]) -> list[dict[str, Any]]:
    return [token_logprobs(token, as_ids=False) for token in tokens]


class _Vectors(EmbeddingReply):
    """Computes the answer of /api/embed: vectors of length 1. A text that is too long loses its
    end."""

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
    """Computes the answer of /api/embeddings: the vector of one text, as the model returns it."""

    keeps_start = True

    def _item(self, number: int, values: Sequence[float], normalizes: bool) -> JsonPieces:
        return JsonPieces((to_json(shaped(values, None, normalizes).tolist()),))

    def _answer(self, prepared: PreparedInputs, vectors: JsonPieces) -> dict[str, Any]:
        return {"embedding": JsonPieces(vectors[1:-1])}


async def embed(
    service: Service, body: OllamaEmbedBody | OllamaEmbeddingsBody, caller: Caller
) -> JsonPieces:
    """Compute the answer of /api/embed or /api/embeddings and return its JSON text. Raises
    ServiceError."""
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
