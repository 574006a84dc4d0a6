"""The models of the fleet as Anthropic's API lists them; pure."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pdserve.protos.common_pb2 import ModelCard

VERSION_HEADER = "anthropic-version"  # a request with it is one of Anthropic's API


def model_info(card: ModelCard) -> dict[str, Any]:
    created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": card.name,
        "display_name": card.name,
        "created_at": created,
        "lifecycle": "active",
        "max_input_tokens": card.context_len,
        "max_tokens": card.context_len,
    }


def model_page(cards: Sequence[ModelCard]) -> dict[str, Any]:
    """All models on one page."""
    data = [model_info(card) for card in cards]
    return {
        "data": data,
        "has_more": False,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }
