"""Routes that describe the server: /v1/models in OpenAI's and in Anthropic's format, and the routes
of llama.cpp and vLLM /tokenize, /detokenize, /props, /slots, /load, /tokenizer_info and
/apply-template.

A client sees all models, the total number of open requests, and details of only its own requests.
"""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from pydantic_core import from_json, to_json
from starlette.responses import JSONResponse

from pdserve.gateway.caller import Caller
from pdserve.gateway.catalog import ServedModel
from pdserve.gateway.http.api import ErrorFormat
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.http.docs import describe
from pdserve.gateway.http.guard import caller_of
from pdserve.gateway.http.responses import Reply
from pdserve.gateway.metrics import MAX_SHOWN
from pdserve.gateway.openai.objects import list_page
from pdserve.gateway.openai.request_models import (
    DetokenizeBody,
    TemplateBody,
    TokenizeBody,
    TokenizeChatBody,
    parse,
    parse_tokenize,
)
from pdserve.gateway.openai.response_models import (
    AppliedTemplate,
    DetokenizeAnswer,
    ModelList,
    ModelObject,
    ServerLoad,
    ServerProps,
    Slots,
    TokenizeAnswer,
    TokenizerInfo,
)
from pdserve.gateway.service import Service
from pdserve.protos.common_pb2 import UNAVAILABLE, ModelCard
from pdserve.services.common.capabilities import embeds, generates, scoring_of
from pdserve.services.common.errors import ServiceError

ANTHROPIC_VERSION = "anthropic-version"  # the header of requests to Anthropic's API


def capabilities(service: Service, card: ModelCard) -> dict[str, bool | None]:
    """Return what the model can do, by name of the capability. `reasoning` is None until the
    model's tokenizer is loaded."""
    completes = generates(card)
    chat = completes and service.catalog.has_template(card)
    text = service.catalog.loaded(card)
    return {
        "completion": completes,
        "chat": chat,
        "tools": chat and service.parsers.reads_calls,
        "reasoning": chat and (service.may_reason(text) if text else None),
        "structured_output": completes,
        "embeddings": embeds(card),
        "score": scoring_of(card) is not None,
    }


def default_sampling(service: Service, card: ModelCard) -> dict[str, float] | None:
    """Return the sampling parameters that requests have by default, as the model or the operator
    sets them; None until the model's files are read."""
    text = service.catalog.loaded(card)
    if text is None:
        return None
    defaults = asdict(text.defaults)
    if (maximum := service.catalog.max_new_tokens) is not None:
        limits = (defaults["max_tokens"], maximum, card.context_len)
        defaults["max_tokens"] = min(limit for limit in limits if limit is not None)
    return {name: value for name, value in defaults.items() if value is not None}


def llama_sampling(
    service: Service, card: ModelCard, max_tokens: str = "n_predict"
) -> dict[str, float]:
    """Return `default_sampling` by llama.cpp's names; empty until the model's files are read.
    `max_tokens`: the name of that parameter, in which Ollama differs from llama.cpp."""
    names = {"repetition_penalty": "repeat_penalty", "max_tokens": max_tokens}
    defaults = default_sampling(service, card) or {}
    return {names.get(name, name): value for name, value in defaults.items()}


def _model_object(service: Service, name: str, card: ModelCard) -> dict[str, Any]:
    """Return a model in OpenAI's format; `name` is its own name or an alias."""
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "pdserve",
        "root": card.name,
        "max_model_len": card.context_len,
        "capabilities": capabilities(service, card),
        "default_sampling_params": default_sampling(service, card),
        "architecture": card.architecture,
        "quantization": card.kv_identity.quantization,
        "weights_bytes": card.weights_bytes,
        "weights_digest": card.kv_identity.weights,
        "kv_identity": card.kv_identity.digest.hex(),
        "numerics_id": card.kv_identity.numerics,
    }


def _model_info(service: Service, name: str, card: ModelCard) -> dict[str, Any]:
    """Return a model in the format of Anthropic's API; `name` is its own name or an alias."""
    created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created,
        "lifecycle": "active",
        "max_input_tokens": card.context_len,
        "max_tokens": min(card.context_len, service.catalog.max_new_tokens or card.context_len),
    }


def _model_page(service: Service, cards: Mapping[str, ModelCard]) -> dict[str, Any]:
    """Return all models and aliases as one page of a list in Anthropic's format."""
    infos = [_model_info(service, name, card) for name, card in cards.items()]
    page = list_page(infos, has_more=False)
    del page["object"]
    return page


async def _tokenize(
    service: Service, body: TokenizeBody | TokenizeChatBody, caller: Caller
) -> dict[str, Any]:
    """Return the answer of /tokenize: the token ids of a text, or of a chat's prompt. Raises
    ServiceError."""
    owner = caller.tenant.id
    with service.limits.admit(owner):
        await service.count(caller)
        model = await service.catalog.get(body.model)
        if isinstance(body, TokenizeChatBody):
            ids = await service.prompt_ids(body.chat_request(), model, caller)
        else:
            ids = await service.texts.text_ids(
                model, body.prompt, "prompt", owner, add_special_tokens=body.add_special_tokens
            )
        pieces = (
            await service.texts.token_pieces(model, ids, owner) if body.return_token_strs else None
        )
        return {
            "count": len(ids),
            "max_model_len": model.card.context_len,
            "tokens": ids,
            "token_strs": pieces,
        }


async def _detokenize(service: Service, body: DetokenizeBody, caller: Caller) -> dict[str, Any]:
    """Return the answer of /detokenize: the text of the token ids. Raises ServiceError."""
    owner = caller.tenant.id
    with service.limits.admit(owner):
        await service.count(caller)
        model = await service.catalog.get(body.model)
        skip = body.skip_special_tokens
        prompt = await service.texts.decode(model, body.tokens, "tokens", owner, skip_special=skip)
        return {"prompt": prompt}


class ModelQuery(BaseModel):
    """URL parameters that select a model; `model` is optional if only one model is served."""

    model: str = ""


class SlotsQuery(BaseModel):
    """URL parameters of /slots. `fail_on_no_slot=1`: return an error if a request of this client
    would be refused now."""

    fail_on_no_slot: str = ""


def add_server_routes(
    app: FastAPI, errors: ErrorFormat, service: Service, bodies: BodyReader
) -> None:
    """Add the routes of this module. /slots and /load include the requests of the other gateway
    processes that listen at the same port."""
    service.processes.serve("slots", lambda tenant, _: to_json(_slots(service, tenant)))
    service.processes.serve("load", lambda tenant, _: to_json(_num_open(service)))

    @app.post("/tokenize", **describe(TokenizeBody, TokenizeChatBody, response=TokenizeAnswer))
    async def tokenize_route(request: Request) -> Response:
        """Convert a text, or messages with the chat template applied, to token ids."""
        body = await bodies.read(request, parse_tokenize)
        return Reply(_tokenize(service, body, caller_of(request)), errors)

    @app.post("/detokenize", **describe(DetokenizeBody, response=DetokenizeAnswer))
    async def detokenize_route(request: Request) -> Response:
        """Convert token ids to text."""
        body = await bodies.read(request, partial(parse, DetokenizeBody))
        return Reply(_detokenize(service, body, caller_of(request)), errors)

    @app.get("/v1/models", **describe(response=ModelList))
    async def models(request: Request) -> Response:
        """List the served models and their aliases; in the format of Anthropic's API if the
        request has the header `anthropic-version`."""
        cards = await service.catalog.listed()
        if ANTHROPIC_VERSION in request.headers:
            return JSONResponse(_model_page(service, cards))
        data = [_model_object(service, name, card) for name, card in cards.items()]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}", **describe(response=ModelObject))
    async def model(request: Request, name: str) -> Response:
        """Get one served model by its name or an alias."""
        card = await service.catalog.card(name)
        name = name or card.name
        if ANTHROPIC_VERSION in request.headers:
            return JSONResponse(_model_info(service, name, card))
        return JSONResponse(_model_object(service, name, card))

    @app.get("/props", **describe(response=ServerProps, query=ModelQuery))
    async def props(request: Request) -> Response:
        """Get the properties of the server and its model, in llama.cpp's format."""
        return JSONResponse(await _props(service, request.query_params.get("model", "")))

    @app.get("/slots", **describe(response=Slots, query=SlotsQuery))
    async def slots(request: Request) -> Response:
        """List the open requests of the client's key, in llama.cpp's format."""
        tenant = caller_of(request).tenant.id
        if request.query_params.get("fail_on_no_slot") == "1":
            _check_room(service, tenant)
        others = await service.processes.query("slots", tenant)
        requests = [state for states in map(from_json, others) for state in states]
        requests = sorted([*_slots(service, tenant), *requests], key=lambda state: -state["age_s"])
        contexts = {card.name: card.context_len for card in await service.catalog.cards()}
        slot_list = [_slot(n, state, contexts) for n, state in enumerate(requests[:MAX_SHOWN])]
        return JSONResponse(slot_list)

    @app.get("/load", **describe(response=ServerLoad))
    async def load(request: Request) -> Response:
        """Count the open requests of all keys, as in vLLM."""
        others = await service.processes.query("load", caller_of(request).tenant.id)
        return JSONResponse({"server_load": _num_open(service) + sum(map(from_json, others))})

    @app.get("/tokenizer_info", **describe(response=TokenizerInfo, query=ModelQuery))
    async def tokenizer_info(request: Request) -> Response:
        """Get the properties of a model's tokenizer and its chat template, as in vLLM."""
        return JSONResponse(await _tokenizer_info(service, request.query_params.get("model", "")))

    @app.post("/apply-template", **describe(TemplateBody, response=AppliedTemplate))
    async def apply_template(request: Request) -> Response:
        """Return the prompt that a chat would have, without running the model."""
        body = await bodies.read(request, partial(parse, TemplateBody))
        return Reply(_applied(service, body, caller_of(request)), errors)


async def _props(service: Service, name: str) -> dict[str, Any]:
    model = await service.catalog.get(name)
    params = llama_sampling(service, model.card)
    return {
        "default_generation_settings": {"n_ctx": model.card.context_len, "params": params},
        "total_slots": service.limits.max_requests,
        "model_alias": model.card.name,
        **await _template_and_tokens(service, model),
        "modalities": {"vision": False, "audio": False},
        "build_info": f"pdserve {version('pdserve')}",
    }


async def _tokenizer_info(service: Service, name: str) -> dict[str, Any]:
    model = await service.catalog.get(name)
    return {
        "model": model.card.name,
        "vocab_size": model.card.vocab_size,
        "model_max_length": model.card.context_len,
        "add_bos_token": model.card.adds_bos,
        **await _template_and_tokens(service, model),
    }


async def _template_and_tokens(service: Service, model: ServedModel) -> dict[str, str]:
    card, vocabulary = model.card, model.text.vocabulary
    return {
        "chat_template": await service.catalog.template(card),
        "bos_token": vocabulary.token_piece(card.bos_id) if card.has_bos else "",
        "eos_token": vocabulary.token_piece(card.eos_ids[0]) if card.eos_ids else "",
    }


async def _applied(service: Service, body: TemplateBody, caller: Caller) -> dict[str, str]:
    owner = caller.tenant.id
    with service.limits.admit(owner):
        await service.count(caller)
        model = await service.catalog.get(body.model)
        ids = await service.prompt_ids(body.chat_request(), model, caller)
        text = await service.texts.decode(model, ids, "messages", owner, skip_special=False)
        return {"prompt": text}


def _num_open(service: Service) -> int:
    return service.limits.open + service.limits.background


def _slots(service: Service, tenant: bytes) -> list[dict[str, Any]]:
    """Return the open requests of a tenant in this gateway process, oldest first."""
    return [
        {
            "request_id": state.request_id,
            "model": state.model,
            "n_prompt_tokens": state.prompt_tokens,
            "num_decoded": state.generated_tokens,
            "age_s": state.elapsed_s,
        }
        for state in service.requests.open_of(tenant)[:MAX_SHOWN]
    ]


def _slot(number: int, state: dict[str, Any], contexts: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "request_id": state["request_id"],
        "model": state["model"],
        "n_ctx": contexts.get(state["model"], 0),
        "is_processing": True,
        "n_prompt_tokens": state["n_prompt_tokens"],
        "next_token": [{"n_decoded": state["num_decoded"]}],
    }


def _check_room(service: Service, tenant: bytes) -> None:
    """Raise ServiceError UNAVAILABLE if a request of this tenant would be refused now; its status
    is 503, as in llama.cpp."""
    try:
        service.limits.admit(tenant)
    except ServiceError as error:
        raise ServiceError(UNAVAILABLE, error.message, retry_after_s=1.0) from None
