"""The usage object of a completion, as OpenAI writes it, with our own fields under `pdserve`."""

from typing import Any

from pdserve.gateway.completion import Usage


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        # With KV of other weights or numerics (--allow-mixed-...) a rerun may give other tokens.
        "pdserve": {"inexact": usage.inexact},
    }
