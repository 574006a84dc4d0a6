"""Fields that Ollama's API has and this server does not serve: refused by name, or ignored on
purpose.

The bodies in schema.py have the fields that are served.
"""

from typing import Any

from pdserve.gateway.http.validation import NOTHING

# fmt: off
# Refused unless the value is one of these.
REFUSED: dict[str, tuple[Any, ...]] = dict.fromkeys(
    (
        "suffix", "template", "context", "images", "width", "height", "steps",
        # OpenAI's names for fields of `options` or `format`
        "max_tokens", "max_completion_tokens", "response_format", "tool_choice",
    ),
    NOTHING,
)

# Hints: how long a model stays loaded, and how Ollama handles a prompt that is too long.
IGNORED: frozenset[str] = frozenset(("keep_alive", "truncate", "shift"))

INSTEAD: dict[str, str] = {
    "max_tokens": "options",
    "max_completion_tokens": "options",
    "response_format": "format",
}

# Fields of `options`.
REFUSED_OPTIONS: dict[str, tuple[Any, ...]] = {
    "mirostat": (None, 0),
    "tfs_z": (None, 1.0),
    "typical_p": (None, 1.0),
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
