"""/v1/models: the models of the fleet as OpenAI lists them, with further fields of their cards."""

from collections.abc import Callable
from typing import Any

from pdserve.protos.common_pb2 import ModelCard

# What a client can ask of a model, by the facts of its card. Whoever serves more adds a row.
CAPABILITIES: dict[str, Callable[[ModelCard], bool]] = {
    "completion": lambda card: not card.pooling,
    "chat": lambda card: not card.pooling and bool(card.template_digest),
}


def model_object(card: ModelCard, *, reads_calls: bool) -> dict[str, Any]:
    """`reads_calls`: whether the gateway finds calls of tools in answers."""
    capabilities = {name: served(card) for name, served in CAPABILITIES.items()}
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "pdserve",
        "max_model_len": card.context_len,
        "capabilities": {**capabilities, "tools": capabilities["chat"] and reads_calls},
        "architecture": card.architecture,
        "quantization": card.kv_identity.quantization,
        "weights_bytes": card.weights_bytes,
        "weights_digest": card.kv_identity.weights,
        "kv_identity": card.kv_identity.digest.hex(),
        "numerics_id": card.kv_identity.numerics,
    }
