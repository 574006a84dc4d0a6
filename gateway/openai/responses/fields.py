"""Fields that /v1/responses knows and does not serve: refused by name, or ignored on purpose.

ResponsesBody in schema.py has the fields that are served.
"""

from typing import Any

from pdserve.gateway.http import fields
from pdserve.gateway.http.validation import NOTHING

# fmt: off
# They change no answer of this server.
IGNORED: frozenset[str] = frozenset(
    (
        "service_tier", "prompt_cache_retention", "prompt_cache_options", "stream_options",
        "access_programs", "request_id",
        "context_management",  # prompts are never shortened, as with truncation
    )
)

# Refused unless the value is one of these, or the field is served.
REFUSED: dict[str, tuple[Any, ...]] = {
    **fields.REFUSED,
    **dict.fromkeys(
        (
            "background", "conversation", "prompt", "moderation", "image", "personality",
        ),
        NOTHING,
    ),
    "truncation": (None, "disabled", "auto"),  # prompts are never shortened
}

# Chats' names for fields that this API names differently.
INSTEAD: dict[str, str] = {
    **{
        name: "max_output_tokens"
        for name, other in {**fields.OTHER_NAMES, "max_tokens": "max_tokens"}.items()
        if other == "max_tokens"
    },
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "functions": "tools",
    "logprobs": "include and top_logprobs",
}
# fmt: on
