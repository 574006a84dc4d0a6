"""The usage object of a completion in OpenAI's format, with pdserve's fields under `pdserve`."""

from typing import Any

from pdserve.gateway.choice import Delta
from pdserve.gateway.openai.bodies.sampling import Sampling
from pdserve.gateway.prepared_completion import PreparedCompletion, Usage


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        # With KV of other weights or numerics (--allow-mixed-...) a rerun may give other tokens.
        "pdserve": {"inexact": usage.inexact},
    }


class StreamUsage:
    """The `usage` in chunks of a stream: none, null until the last one, or the counts so far.
    Cached tokens are not known before the end."""

    def __init__(self, body: Sampling, completion: PreparedCompletion) -> None:
        self._include_usage = body.include_usage
        self._continuous = body.continuous_usage
        self._prompt_tokens = sum(len(prompt.ids) for prompt in completion.prompts)
        self._generated: dict[int, int] = {}

    def before(self) -> dict[str, Any]:
        """Return the usage of a chunk that comes before the next tokens."""
        if not self._continuous:
            return {"usage": None} if self._include_usage else {}
        generated = sum(self._generated.values())
        counts = {"prompt_tokens": self._prompt_tokens, "completion_tokens": generated}
        return {"usage": {**counts, "total_tokens": self._prompt_tokens + generated}}

    def after(self, delta: Delta) -> dict[str, Any]:
        """Return the usage of a chunk with the delta's tokens."""
        if self._continuous:
            self._generated[delta.choice] = delta.num_tokens
        return self.before()
