"""Completion requests, the same for every API; pure data."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.gateway.requests.sampling import RequestedSampling
from pdserve.gateway.requests.tool_use import ToolUse
from pdserve.gateway.text.messages import TemplateInput


@dataclass(frozen=True, slots=True)
class ChatCompletionRequest:
    """A chat completion as a client requests it."""

    model: str
    conversation: TemplateInput
    sampling: RequestedSampling
    cache_salt: bytes = b""
    priority: int = 0  # lower is earlier
    kept_tokens: int | None = None  # of the prompt, from its end; -1: what fits; None: all
    tool_use: ToolUse | None = None
    separate_reasoning: bool = True  # False: reasoning is part of the answer's text
    max_tool_calls: int | None = None  # carried out by the gateway; None: any number

    @property
    def continues(self) -> bool:
        """Return whether the answer continues the prompt's text."""
        return self.conversation.continue_final_message


@dataclass(frozen=True, slots=True)
class TextCompletionRequest:
    """A plain completion of texts or token ids, as a client requests it."""

    model: str
    prompts: Sequence[str | Sequence[int]]
    sampling: RequestedSampling
    prompt_field: str = "prompt"  # name of the field in the request
    echo: bool = False
    echo_only: bool = False
    add_special_tokens: bool = True
    cache_salt: bytes = b""
    priority: int = 0  # lower is earlier
    kept_tokens: int | None = None  # of each prompt, from its end; -1: what fits; None: all

    @property
    def continues(self) -> bool:
        """Return whether the answer continues the prompt's text."""
        return True
