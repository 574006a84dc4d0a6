"""Fields that /v1/messages knows and does not serve: refused by name, or ignored on purpose.

MessagesBody in schema.py has the fields that are served.
"""

from typing import Any

from pdserve.gateway.http.validation import NOTHING

# fmt: off
# Refused unless the value is one of these.
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            # Anthropic, with betas
            "compaction", "fallbacks", "thread", "user_profile_id",
            "context_management",  # edits that only clear reasoning are accepted (schema.py)
            # OpenAI, vLLM
            "seed", "stop", "logit_bias", "logprobs", "top_logprobs", "functions", "input",
            "instructions", "prompt", "max_completion_tokens", "max_output_tokens", "reasoning",
            "reasoning_effort", "chat_template_kwargs", "structured_outputs", "stop_token_ids",
            "cache_salt",
        ),
        NOTHING,
    ),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p"), (*NOTHING, 0)),
    "repetition_penalty": (*NOTHING, 1),
    "response_format": (*NOTHING, {"type": "text"}),
    "n": (None, 1),
    "speed": (None, "standard"),
}

# They change no answer of this server. The provider's own tools run in a container.
IGNORED: frozenset[str] = frozenset(
    (
        "service_tier", "cache_control", "container", "diagnostics", "inference_geo", "betas",
        "billing_policy", "fallback_credit_token", "workspace_id",
    )
)

# They offer tools that cannot be run here.
LEFT_OUT: frozenset[str] = frozenset(("mcp_servers",))

# OpenAI's names for fields that this API names differently.
INSTEAD: dict[str, str] = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "response_format": "output_config.format",
    "structured_outputs": "output_config.format",
    "input": "messages",
    "prompt": "messages",
    "instructions": "system",
    "functions": "tools",
    "reasoning": "thinking",
    "reasoning_effort": "output_config.effort",
}
# fmt: on
