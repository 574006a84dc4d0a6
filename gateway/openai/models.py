"""/v1/models: the models of the fleet in OpenAI's format, with further fields of their cards, and
in Anthropic's."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from pdserve.gateway.service import Service
from pdserve.protos.common_pb2 import ModelCard

ANTHROPIC_VERSION = "anthropic-version"  # the header of requests to Anthropic's API


def capabilities(service: Service, card: ModelCard) -> dict[str, bool | None]:
    """Return what the model can do; null: not known before its tokenizer is loaded."""
    generates = not (card.pooling or card.score_token_ids)
    chat = generates and bool(card.template_digest)
    text = service.catalog.loaded(card)
    return {
        "completion": generates,
        "chat": chat,
        "tools": chat and service.parsers.reads_calls,
        "reasoning": chat and (service.may_reason(text) if text else None),
        "structured_output": generates,
        "embeddings": bool(card.pooling),
        "score": not generates,
    }


def default_sampling(service: Service, card: ModelCard) -> dict[str, float] | None:
    """Return the model's recommended sampling; None before its files are read."""
    text = service.catalog.loaded(card)
    if text is None:
        return None
    return {name: value for name, value in asdict(text.defaults).items() if value is not None}


def llama_sampling(service: Service, card: ModelCard) -> dict[str, float]:
    """Return the recommended sampling in llama.cpp's words; empty before its files are read."""
    names = {"repetition_penalty": "repeat_penalty"}
    defaults = default_sampling(service, card) or {}
    return {names.get(name, name): value for name, value in defaults.items()}


def model_object(service: Service, name: str, card: ModelCard) -> dict[str, Any]:
    """Return a model under its own name or an alias."""
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


def model_info(name: str, card: ModelCard) -> dict[str, Any]:
    """Return a model in the format of Anthropic's API."""
    created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created,
        "lifecycle": "active",
        "max_input_tokens": card.context_len,
        "max_tokens": card.context_len,
    }


def model_page(cards: Mapping[str, ModelCard]) -> dict[str, Any]:
    """Return all models and aliases on one page of Anthropic's API."""
    data = [model_info(name, card) for name, card in cards.items()]
    return {
        "data": data,
        "has_more": False,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }
