"""The models of the fleet as Ollama lists them: /api/tags, /api/ps and /api/show."""

from datetime import UTC, datetime
from typing import Any

from pdserve.gateway.openai import capabilities, llama_sampling
from pdserve.gateway.service import Service
from pdserve.protos.common_pb2 import ModelCard

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
    """Return the name without the tag `latest`, unless a model or an alias has that tag."""
    if not name.endswith(LATEST) or await service.catalog.knows(name):
        return name
    return name.removesuffix(LATEST)


async def tags(service: Service) -> dict[str, Any]:
    """Return the served models and their aliases."""
    cards = await service.catalog.listed()
    return {"models": [_tag(name, card) for name, card in cards.items()]}


async def processes(service: Service) -> dict[str, Any]:
    """Return the loaded models, which are all served models."""
    cards = await service.catalog.listed()
    return {
        "models": [
            {**_tag(name, card), "expires_at": NEVER, "context_length": card.context_len}
            for name, card in cards.items()
        ]
    }


async def show(service: Service, name: str) -> dict[str, Any]:
    """Return the description of one model. Raises ServiceError."""
    model = await service.catalog.get(await served_name(service, name))
    card = model.card
    abilities = capabilities(service, card)
    defaults = llama_sampling(service, card)
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
    return written(datetime.fromtimestamp(card.created, UTC))


def written(time: datetime) -> str:
    """Return a UTC time in this API's format."""
    return time.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
