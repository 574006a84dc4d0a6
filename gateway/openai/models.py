"""/v1/models: what the fleet serves, as OpenAI lists it, with what the card says besides."""

from typing import Any

from pdserve.protos.common_pb2 import ModelCard


def model_object(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "pdserve",
        "max_model_len": card.context_len,
        "architecture": card.architecture,
        "quantization": card.quantization,
        "weights_bytes": card.weights_bytes,
        "weights_digest": card.weights_digest,
        "kv_identity": card.kv_identity.hex(),
        "numerics_id": card.numerics_id,
    }
