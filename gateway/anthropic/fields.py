"""Fields that /v1/messages knows and does not serve: refused by name, or ignored on purpose.

MessagesBody in schema.py has the fields that are served.
"""

from typing import Any

from pdserve.gateway.http import fields
from pdserve.gateway.http.validation import NOTHING

# fmt: off
# Refused unless the value is one of these, or the field is served.
REFUSED: dict[str, tuple[Any, ...]] = {
    **fields.REFUSED,
    **dict.fromkeys(("compaction", "fallbacks", "thread", "user_profile_id"), NOTHING),
    "speed": (None, "standard"),
}

# They change no answer of this server. The provider's own tools run in a container, and prompts are
# never shortened.
IGNORED: frozenset[str] = frozenset(
    (
        "service_tier", "cache_control", "container", "diagnostics", "inference_geo", "betas",
        "billing_policy", "fallback_credit_token", "workspace_id", "context_management",
    )
)

# They offer tools that cannot be run here.
LEFT_OUT: frozenset[str] = frozenset(("mcp_servers",))

# Names of other APIs for fields that this one names differently.
INSTEAD: dict[str, str] = {
    **{
        name: {"stop": "stop_sequences"}.get(other, other)
        for name, other in {**fields.OTHER_NAMES, "stop": "stop"}.items()
        if other in ("stop", "max_tokens", "tools", "tool_choice")
    },
    **dict.fromkeys(
        ("response_format", "structured_outputs", "guided_json", "json_schema", "format"),
        "output_config.format",
    ),
    **dict.fromkeys(
        ("thinking_token_budget", "thinking_budget", "reasoning_budget"), "thinking.budget_tokens"
    ),
    "input": "messages",
    "prompt": "messages",
    "instructions": "system",
    "reasoning": "thinking",
    "reasoning_effort": "output_config.effort",
    "include_reasoning": "thinking.display",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
# fmt: on
