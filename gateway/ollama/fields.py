"""Fields that Ollama's API has and this server does not serve: refused by name, or ignored on
purpose.

The bodies in schema.py have the fields that are served.
"""

from typing import Any

from pdserve.gateway.http import fields
from pdserve.gateway.http.validation import NOTHING

# fmt: off
# Refused unless the value is one of these.
UNSERVED: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("suffix", "template", "context", "images", "width", "height", "steps"), NOTHING
)

# The same where an answer is generated, unless the field is served.
REFUSED: dict[str, tuple[Any, ...]] = {
    **fields.REFUSED,
    **UNSERVED,
    "tool_choice": (*NOTHING, "auto"),
}

# Hints: how long a model stays loaded, and how Ollama handles a prompt that is too long.
IGNORED: frozenset[str] = frozenset(("keep_alive", "truncate", "shift"))

_LIMITS = ("max_tokens", *(n for n, other in fields.OTHER_NAMES.items() if other == "max_tokens"))
INSTEAD: dict[str, str] = {
    **dict.fromkeys(
        (
            *_LIMITS, "temperature", "top_k", "top_p", "min_p", "seed", "random_seed", "stop",
            "stop_sequences", "repeat_penalty", "repetition_penalty", "repeat_last_n",
            "presence_penalty", "frequency_penalty",
        ),
        "options",
    ),
    **dict.fromkeys(
        ("response_format", "structured_outputs", "guided_json", "json_schema"), "format"
    ),
    **dict.fromkeys(("reasoning", "reasoning_effort"), "think"),
}

# For fields of `options`, which are refused as the others are.
INSTEAD_OPTIONS: dict[str, str] = {
    **dict.fromkeys(_LIMITS, "num_predict"),
    "repetition_penalty": "repeat_penalty",
}

# Options for how Ollama loads and runs a model.
IGNORED_OPTIONS: frozenset[str] = frozenset(
    (
        "num_ctx", "num_batch", "num_gpu", "num_thread", "num_keep", "main_gpu", "numa",
        "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock",
        "embedding_only", "penalize_newline", "mirostat_tau", "mirostat_eta",
    )
)
# fmt: on
